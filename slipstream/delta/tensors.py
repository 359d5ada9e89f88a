"""Weights as named raw bytes, and safetensors files without a framework.

https://huggingface.co/docs/safetensors: 8 bytes header length (little-endian), a JSON header, the data.
"""

import itertools
import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from slipstream.errors import ConfigError, IntegrityError, StoreFullError

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | mmap.mmap

ITEM_SIZES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element by safetensors type name."""

_MAX_HEADER = 100 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class RawTensor:
    """One tensor as bytes."""

    dtype: str
    """safetensors type name, for example `BF16`."""
    shape: tuple[int, ...]
    data: Bytes
    """uint8, 1-D, contiguous: the elements in row-major order, little-endian. May be a view of a file."""

    @property
    def itemsize(self) -> int:
        return ITEM_SIZES.get(self.dtype, 1)


Weights = Mapping[str, RawTensor]


def digest(data: Bytes) -> str:
    """XXH3-128 of a tensor's bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


def size_bytes(weights: Weights) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.data.nbytes for tensor in weights.values())


def parse_safetensors(buffer: Buffer, *, what: str = "safetensors data") -> dict[str, RawTensor]:
    """Tensors of a safetensors file, as views of the buffer.

    Raises:
        IntegrityError: the bytes are not a well-formed safetensors file.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    header, start = _header(data, what)
    body = data[start:]
    tensors: dict[str, RawTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (TypeError, KeyError, ValueError):
            raise IntegrityError(f"{what}: the header's entry for {name!r} is malformed") from None
        size = ITEM_SIZES.get(dtype)
        if size is None:
            raise IntegrityError(f"{what}: tensor {name!r} has the unknown type {dtype!r}")
        if (
            not 0 <= begin <= end <= body.nbytes
            or min(shape, default=0) < 0
            or prod(shape) * size != end - begin
        ):
            raise IntegrityError(f"{what}: tensor {name!r} does not fit into the file")
        spans.append((begin, end))
        tensors[name] = RawTensor(dtype, shape, body[begin:end])
    spans.sort()
    if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        raise IntegrityError(f"{what}: tensors overlap")
    return tensors


def read_metadata(buffer: Buffer, *, what: str = "safetensors data") -> dict[str, str]:
    """The `__metadata__` of a safetensors file; empty when there is none."""
    header, _ = _header(np.frombuffer(buffer, dtype=np.uint8), what)
    return dict(header.get("__metadata__", {}))


def _header(data: Bytes, what: str) -> tuple[dict[str, Any], int]:
    if data.nbytes < 8:
        raise IntegrityError(f"{what}: {data.nbytes} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(data.nbytes - 8, _MAX_HEADER):
        raise IntegrityError(f"{what}: the header is longer than the file")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError:
        raise IntegrityError(f"{what}: the header is not JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise IntegrityError(f"{what}: the header is not a JSON object")
    return header, 8 + length


def safetensors_header(weights: Weights, metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header of a safetensors file that holds the tensors in the mapping's order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
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

    Raises:
        ConfigError: there is no safetensors file, or two files hold a tensor of the same name.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{directory}: no *.safetensors in it")
    weights: dict[str, RawTensor] = {}
    for path in paths:
        tensors = load_safetensors(path)
        if twice := weights.keys() & tensors.keys():
            raise ConfigError(f"{path}: tensor {min(twice)!r} is in another file of the checkpoint too")
        weights.update(tensors)
    return weights
