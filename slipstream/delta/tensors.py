"""Weights as named raw bytes, and safetensors files without a framework.

https://huggingface.co/docs/safetensors: 8 bytes header length (little-endian), a JSON header, the data.
"""

import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from slipstream.errors import ConfigError, IntegrityError, StoreFullError

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | mmap.mmap

_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
DTYPES = tuple(_BITS)
"""Type names that safetensors knows."""

_MAX_HEADER = 100 * 1024 * 1024
_METADATA = "__metadata__"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class RawTensor:
    """One tensor as bytes. Nobody writes to `data` any more: references and host copies share it.

    Raises:
        ConfigError: the bytes are not those of such a tensor.
    """

    dtype: str
    """safetensors type name, for example `BF16`."""
    shape: tuple[int, ...]
    data: Bytes
    """uint8, 1-D, contiguous: the elements in row-major order, little-endian. May be a view of a file."""

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise ConfigError("a tensor's data must be a contiguous array of uint8 with one dimension")
        if (size := tensor_bytes(self.dtype, self.shape)) != self.data.nbytes:
            raise ConfigError(
                f"{self.dtype} {list(self.shape)} takes {size} bytes, {self.data.nbytes} are given"
            )

    @property
    def itemsize(self) -> int:
        """Bytes per element; 1 for elements smaller than a byte."""
        return max(1, _BITS[self.dtype] // 8)


Weights = Mapping[str, RawTensor]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor.

    Raises:
        ConfigError: unknown type, negative dimension, or elements that do not fill whole bytes.
    """
    if dtype not in _BITS:
        raise ConfigError(f"unknown tensor type {dtype!r}; known are {', '.join(DTYPES)}")
    if min(shape, default=0) < 0:
        raise ConfigError(f"negative dimension in {list(shape)}")
    size, rest = divmod(prod(shape) * _BITS[dtype], 8)
    if rest:
        raise ConfigError(f"{dtype} {list(shape)} does not fill whole bytes")
    return size


def digest(data: Bytes) -> str:
    """XXH3-128 of a tensor's bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


def size_bytes(weights: Weights) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.data.nbytes for tensor in weights.values())


class Place(NamedTuple):
    """Where a tensor is in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int


def parse_safetensors(buffer: Buffer, *, what: str = "safetensors data") -> dict[str, RawTensor]:
    """Tensors of a safetensors file, in the order of their bytes, as views of the buffer.

    Raises:
        IntegrityError: the bytes are not a well-formed safetensors file.
    """
    places, start = read_layout(buffer, what=what)
    body = np.frombuffer(buffer, dtype=np.uint8)[start:]
    if (end := places[-1].end if places else 0) != body.nbytes:
        raise IntegrityError(f"{what}: there are {body.nbytes} bytes of data, the header speaks of {end}")
    return {p.name: RawTensor(p.dtype, p.shape, body[p.begin : p.end]) for p in places}


def read_layout(buffer: Buffer, *, what: str = "safetensors data") -> tuple[list[Place], int]:
    """Tensors by ascending place, and where the header ends. Needs no more than the header.

    Raises:
        IntegrityError: the header is malformed, or tensors overlap or leave holes.
    """
    header, start = _header(np.frombuffer(buffer, dtype=np.uint8), what)
    places = [_place(name, item, what) for name, item in header.items() if name != _METADATA]
    places.sort(key=lambda place: (place.begin, place.end))
    end = 0
    for place in places:
        if place.begin != end:
            raise IntegrityError(f"{what}: tensor {place.name!r} does not begin where the one before ends")
        end = place.end
    return places, start


def _place(name: str, item: Any, what: str) -> Place:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        if not all(type(n) is int for n in (*shape, begin, end)):
            raise TypeError("shape and offsets must be whole numbers")
        if begin < 0 or end - begin != tensor_bytes(dtype, shape):
            raise ValueError(f"{dtype} {list(shape)} does not fit its place")
    except (TypeError, KeyError, ValueError) as error:
        raise IntegrityError(f"{what}: the header's entry for {name!r} is malformed: {error}") from None
    return Place(name, dtype, shape, begin, end)


def read_metadata(buffer: Buffer, *, what: str = "safetensors data") -> dict[str, str]:
    """The `__metadata__` of a safetensors file; empty when there is none."""
    header, _ = _header(np.frombuffer(buffer, dtype=np.uint8), what)
    return dict(header.get(_METADATA, {}))


def header_bytes(buffer: Buffer, *, what: str = "safetensors data") -> bytes:
    """Length and header of a safetensors file as they stand.

    Raises:
        IntegrityError: malformed.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    return data[: _header(data, what)[1]].tobytes()


def _header(data: Bytes, what: str) -> tuple[dict[str, Any], int]:
    if data.nbytes < 8:
        raise IntegrityError(f"{what}: {data.nbytes} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(data.nbytes - 8, _MAX_HEADER):
        raise IntegrityError(f"{what}: the header is longer than the file")
    try:
        header = json.loads(data[8 : 8 + length].tobytes().decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise IntegrityError(f"{what}: the header is not JSON, or names a tensor twice") from None
    if not isinstance(header, dict) or not isinstance(header.get(_METADATA, {}), dict):
        raise IntegrityError(f"{what}: the header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def safetensors_header(weights: Weights, metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header of a safetensors file that holds the tensors in the mapping's order."""
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in weights.items():
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_bytes(weights: Weights, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file in memory."""
    return b"".join([safetensors_header(weights, metadata), *(t.data.data for t in weights.values())])


def write_safetensors(path: Path, weights: Weights, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file atomically.

    Raises:
        StoreFullError: the disk has no room, or the directory cannot be written.
    """
    write_atomically(path, [safetensors_header(weights, metadata), *(t.data.data for t in weights.values())])


def write_atomically(path: Path, parts: Sequence[Buffer]) -> None:
    """Writes parts one after the other under a temporary name, then renames.

    Raises:
        StoreFullError: the disk has no room, or the directory cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise StoreFullError(f"cannot write {path}: {error.strerror}") from None


def map_file(path: Path) -> mmap.mmap:
    """A file as read-only memory.

    Raises:
        ConfigError: there is no such file, it is empty, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty"
        raise ConfigError(f"cannot read {path}: {reason}") from None


def load_safetensors(path: Path) -> dict[str, RawTensor]:
    """Tensors of a safetensors file, as views of the mapped file."""
    return parse_safetensors(map_file(path), what=str(path))


def load_checkpoint(directory: Path) -> dict[str, RawTensor]:
    """All tensors of a Hugging Face checkpoint directory, as views of the mapped files.

    Reads the files that `model.safetensors.index.json` names, else `model.safetensors`, else all
    `*.safetensors`: some models carry a second, consolidated copy beside the first.

    Raises:
        ConfigError: there is no safetensors file, or two files hold a tensor of the same name.
        IntegrityError: a file or the index is malformed.
    """
    weights: dict[str, RawTensor] = {}
    for path in _checkpoint_files(directory):
        tensors = load_safetensors(path)
        if twice := weights.keys() & tensors.keys():
            raise ConfigError(f"{path}: tensor {min(twice)!r} is in another file of the checkpoint too")
        weights.update(tensors)
    return weights


def _checkpoint_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        try:
            return [
                directory / name
                for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise IntegrityError(f"{index}: no map from tensors to files in it") from None
    single = directory / "model.safetensors"
    paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{directory}: no *.safetensors in it")
    return paths
