"""Deltas between safetensors files on disk.

A delta made here also carries the new file's header, so that the file itself comes back byte for byte: the
order of its tensors and its metadata included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.delta.container import DeltaInfo, apply_delta, encode_delta, read_info
from slipstream.delta.tensors import (
    Buffer,
    Weights,
    header_bytes,
    map_file,
    parse_safetensors,
    read_layout,
    tensor_bytes,
    write_atomically,
    write_safetensors,
)
from slipstream.errors import ConfigError, IntegrityError, NotFoundError
from slipstream.v1.weights_pb2 import TensorEntry

HEADER = "safetensors.header"
"""Metadata key of the new file's header."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors and of the delta between them."""

    full_bytes: int
    delta_bytes: int
    tensors: int
    changed: int
    """Tensors with changed bytes."""

    @property
    def ratio(self) -> float:
        return self.full_bytes / self.delta_bytes


def encode_file(old: Path, new: Path, out: Path, codec: str = "xor-zstd") -> Sizes:
    """Writes the delta from `old` to `new`, atomically.

    Raises:
        NotFoundError: a file is missing or cannot be read.
        IntegrityError: a file is not a safetensors file.
        TensorSetError, TensorTypeError: the files' tensors do not correspond.
        StoreFullError: `out` cannot be written.
    """
    before, buffer = parse_safetensors(_map(old), what=str(old)), _map(new)
    after = parse_safetensors(buffer, what=str(new))
    header = header_bytes(buffer, what=str(new))[8:].decode()
    blob, entries = encode_delta(before, after, codec, {HEADER: header})
    write_atomically(out, [blob])
    return _sizes(entries, len(blob))


def apply_file(old: Path, delta: Path, out: Path) -> Sizes:
    """Writes the file that `delta` leads to from `old`, atomically.

    Raises:
        NotFoundError: a file is missing or cannot be read.
        WrongBaseError: `old` is not the file that the delta was made from.
        IntegrityError: a file is damaged.
        TensorSetError, TensorTypeError: the delta is for other tensors.
        StoreFullError: `out` cannot be written.
    """
    weights, blob = parse_safetensors(_map(old), what=str(old)), _map(delta)
    try:
        info = read_info(blob)
        new = apply_delta(weights, blob)
    except IntegrityError as error:
        raise type(error)(f"{delta}: {error}") from None
    if HEADER in info.metadata:
        _write_as_it_was(out, new, info.metadata[HEADER], str(delta))
    else:
        write_safetensors(out, new, info.metadata)
    return _sizes(info.entries, memoryview(blob).nbytes)


def inspect_file(delta: Path) -> tuple[DeltaInfo, Sizes]:
    """What a delta file holds.

    Raises:
        NotFoundError: it is missing or cannot be read.
        IntegrityError: it is damaged.
    """
    blob = _map(delta)
    try:
        info = read_info(blob)
    except IntegrityError as error:
        raise IntegrityError(f"{delta}: {error}") from None
    return info, _sizes(info.entries, memoryview(blob).nbytes)


def _write_as_it_was(out: Path, weights: Weights, text: str, what: str) -> None:
    header = text.encode()
    header = len(header).to_bytes(8, "little") + header
    places, _ = read_layout(header, what=f"{what}, the header in it")
    if [p[:3] for p in places] != [(name, t.dtype, t.shape) for name, t in weights.items()]:
        raise IntegrityError(f"{what}: the header in it is for other tensors")
    write_atomically(out, [header, *(tensor.data.data for tensor in weights.values())])


def _sizes(entries: Sequence[TensorEntry], delta_bytes: int) -> Sizes:
    return Sizes(
        full_bytes=sum(tensor_bytes(e.dtype, e.shape) for e in entries),
        delta_bytes=delta_bytes,
        tensors=len(entries),
        changed=sum(e.digest_before != e.digest_after for e in entries),
    )


def _map(path: Path) -> Buffer:
    if not path.is_file():
        raise NotFoundError(f"{path}: there is no such file")
    if not path.stat().st_size:
        raise IntegrityError(f"{path} is empty")
    try:
        return map_file(path)
    except ConfigError as error:
        raise NotFoundError(str(error)) from None
