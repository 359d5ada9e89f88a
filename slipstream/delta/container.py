"""Delta files: the difference between two sets of named tensors. The format is in `format.md`."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from typing import Any, TypeVar

import numpy as np
import xxhash
import zstandard

from slipstream.delta.codec import decompress, get_codec
from slipstream.delta.tensors import Buffer, RawTensor, Weights, digest, tensor_bytes
from slipstream.errors import ConfigError, IntegrityError, WrongBaseError
from slipstream.v1.weights_pb2 import TensorEntry

MAGIC = b"SLPDELTA"
FORMAT = 1
_FIXED = struct.Struct("<8sIIIQ")
"""Magic, format, bytes of the compressed header, bytes of the header, bytes of all payloads."""
_CHECKSUM = 16
_MAX_HEADER = 256 * 1024 * 1024

A = TypeVar("A")
B = TypeVar("B")


class TensorSetError(ConfigError):
    """A tensor is in one of two sets of weights only."""


class TensorTypeError(ConfigError):
    """A tensor has different shapes or types in two sets of weights."""


@dataclass(frozen=True)
class DeltaInfo:
    """What a delta file says about itself."""

    entries: list[TensorEntry]
    spans: list[tuple[int, int]]
    """Per entry, (offset, length) of its payload in the file; length 0 when nothing changed."""
    metadata: dict[str, str]


def encode_delta(
    old: Weights, new: Weights, codec: str = "xor-zstd", metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[TensorEntry]]:
    """The delta file that leads from `old` to `new`, and its entries. CPU-bound: call it off the event loop.

    The same input gives the same bytes. A tensor that the codec does not make smaller is stored as it is.

    Raises:
        TensorSetError: a tensor is missing or extra.
        TensorTypeError: a tensor changed its shape or type.
        ConfigError: the codec is unknown.
    """
    check_same_tensors(old, new)
    get_codec(codec)
    encoded = parallel(lambda name: _encode_tensor(name, old[name], new[name], codec), new)
    entries = [entry for entry, _ in encoded]
    return _assemble(entries, [payload for _, payload in encoded], metadata or {}), entries


def _encode_tensor(name: str, old: RawTensor, new: RawTensor, codec: str) -> tuple[TensorEntry, bytes]:
    entry = TensorEntry(
        name=name,
        dtype=new.dtype,
        shape=new.shape,
        codec=codec,
        digest_before=digest(old.data),
        digest_after=digest(new.data),
    )
    if entry.digest_before == entry.digest_after:
        return entry, b""
    payload = get_codec(codec).encode(old.data, new.data, new.itemsize)
    if len(payload) >= new.data.nbytes:
        entry.codec = "raw"
        payload = get_codec("raw").encode(old.data, new.data, new.itemsize)
    return entry, payload


def apply_delta(old: Weights, blob: Buffer, digests: Mapping[str, str] | None = None) -> dict[str, RawTensor]:
    """The tensors that a delta file leads to, each checked against its digest; `old` is not changed.

    A tensor that already has the new digest is taken as it is, so applying twice is harmless. CPU-bound.

    Args:
        digests: of `old`, for a caller that has just computed them.

    Returns:
        The tensors of the file, in its order; unchanged ones are the very objects of `old`.

    Raises:
        WrongBaseError: a tensor's bytes are neither those before nor those after.
        IntegrityError: the file is damaged.
        TensorSetError: a tensor is missing or extra.
        TensorTypeError: a tensor has another shape or type.
    """
    info = read_info(blob)
    view = memoryview(blob).cast("B")
    _check_fits(old, info.entries)

    def apply(item: tuple[TensorEntry, tuple[int, int]]) -> tuple[str, RawTensor]:
        entry, (offset, length) = item
        tensor = old[entry.name]
        found = digests[entry.name] if digests is not None else digest(tensor.data)
        return entry.name, _apply_tensor(tensor, found, entry, view[offset : offset + length])

    return dict(parallel(apply, zip(info.entries, info.spans, strict=True)))


def _apply_tensor(tensor: RawTensor, found: str, entry: TensorEntry, payload: memoryview) -> RawTensor:
    if found == entry.digest_after:
        return tensor
    if found != entry.digest_before:
        raise WrongBaseError(
            f"tensor {entry.name!r}: these are not the weights that the delta was made from "
            f"(digest {found}, expected {entry.digest_before})"
        )
    out = np.empty_like(tensor.data)
    get_codec(entry.codec).decode(tensor.data, payload, tensor.itemsize, out)
    if digest(out) != entry.digest_after:
        raise IntegrityError(f"tensor {entry.name!r}: decoded bytes do not have the promised digest")
    return RawTensor(tensor.dtype, tensor.shape, out)


def read_info(blob: Buffer) -> DeltaInfo:
    """Header of a delta file, after the checksum of the whole file was found right.

    Raises:
        IntegrityError: not a delta file, damaged, or of a newer format.
    """
    view = memoryview(blob).cast("B")
    if view[: len(MAGIC)] != MAGIC:
        raise IntegrityError("not a delta file")
    if view.nbytes < _FIXED.size + _CHECKSUM:
        raise IntegrityError("the delta file is cut short")
    _, version, packed, length, payload = _FIXED.unpack_from(view)
    if version != FORMAT:
        raise IntegrityError(f"delta format {version} is not known here (known: {FORMAT}); update Slipstream")
    expected = _FIXED.size + packed + payload + _CHECKSUM
    if view.nbytes != expected:
        raise IntegrityError(f"the delta file has {view.nbytes} bytes and should have {expected}")
    if xxhash.xxh3_128_digest(view[:-_CHECKSUM]) != view[-_CHECKSUM:]:
        raise IntegrityError("the delta file is damaged: its checksum is wrong")
    if length > _MAX_HEADER:
        raise IntegrityError(f"the delta file's header claims {length} bytes; at most {_MAX_HEADER} are read")
    text = decompress(view[_FIXED.size : _FIXED.size + packed], length)
    return _parse_header(text, _FIXED.size + packed, payload)


def check_same_tensors(old: Weights, new: Weights) -> None:
    """Checks that two sets of weights hold tensors of the same names, shapes and types.

    Raises:
        TensorSetError, TensorTypeError: names the first difference.
    """
    if missing := sorted(old.keys() - new.keys()):
        raise TensorSetError(f"tensor {missing[0]!r} is missing in the new weights ({len(missing)} in all)")
    if extra := sorted(new.keys() - old.keys()):
        raise TensorSetError(f"tensor {extra[0]!r} is not in the old weights ({len(extra)} in all)")
    for name, tensor in new.items():
        before = old[name]
        if before.shape != tensor.shape:
            raise TensorTypeError(f"tensor {name!r} changed its shape from {before.shape} to {tensor.shape}")
        if before.dtype != tensor.dtype:
            raise TensorTypeError(f"tensor {name!r} changed its type from {before.dtype} to {tensor.dtype}")


def digests_of(weights: Weights) -> dict[str, str]:
    """Digest of every tensor. CPU-bound."""
    return dict(zip(weights, parallel(lambda name: digest(weights[name].data), weights), strict=True))


def parallel(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Maps over items in threads, keeping the order; numpy, zstd and xxhash let go of the interpreter."""
    with ThreadPoolExecutor(max_workers=cpu_count() or 1) as pool:
        return list(pool.map(function, items))


def _check_fits(old: Weights, entries: list[TensorEntry]) -> None:
    if extra := old.keys() - {entry.name for entry in entries}:
        raise TensorSetError(
            f"tensor {min(extra)!r} of the weights is not in the delta ({len(extra)} in all)"
        )
    for entry in entries:
        tensor = old.get(entry.name)
        if tensor is None:
            raise TensorSetError(f"tensor {entry.name!r} of the delta is missing in the weights")
        if tensor.shape != tuple(entry.shape):
            raise TensorTypeError(
                f"tensor {entry.name!r} has the shape {tensor.shape}, the delta is for {tuple(entry.shape)}"
            )
        if tensor.dtype != entry.dtype:
            raise TensorTypeError(f"tensor {entry.name!r} is {tensor.dtype}, the delta is for {entry.dtype}")


def _assemble(entries: list[TensorEntry], payloads: list[bytes], metadata: Mapping[str, str]) -> bytes:
    tensors = [
        {
            "name": e.name,
            "dtype": e.dtype,
            "shape": list(e.shape),
            "codec": e.codec,
            "before": e.digest_before,
            "after": e.digest_after,
            "bytes": len(payload),
        }
        for e, payload in zip(entries, payloads, strict=True)
    ]
    header: dict[str, Any] = {"tensors": tensors, "metadata": dict(metadata)}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    packed = zstandard.ZstdCompressor(level=3).compress(text)
    fixed = _FIXED.pack(MAGIC, FORMAT, len(packed), len(text), sum(map(len, payloads)))
    checksum = xxhash.xxh3_128()
    for part in (fixed, packed, *payloads):
        checksum.update(part)
    return b"".join([fixed, packed, *payloads, checksum.digest()])


def _parse_header(text: bytes, start: int, payload_bytes: int) -> DeltaInfo:
    entries: list[TensorEntry] = []
    spans: list[tuple[int, int]] = []
    offset = start
    try:
        header = json.loads(text)
        for item in header["tensors"]:
            entry, length = _parse_entry(item)
            entries.append(entry)
            spans.append((offset, length))
            offset += length
        metadata = {str(k): str(v) for k, v in header["metadata"].items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise IntegrityError(f"the delta file's header is malformed: {error}") from None
    if len({entry.name for entry in entries}) != len(entries):
        raise IntegrityError("the delta file names a tensor twice")
    if offset != start + payload_bytes:
        raise IntegrityError("the delta file's payloads are not as long as its header says")
    return DeltaInfo(entries, spans, metadata)


def _parse_entry(item: Any) -> tuple[TensorEntry, int]:
    entry = TensorEntry(
        name=item["name"],
        dtype=item["dtype"],
        shape=item["shape"],
        codec=item["codec"],
        digest_before=item["before"],
        digest_after=item["after"],
    )
    length = item["bytes"]
    tensor_bytes(entry.dtype, entry.shape)
    if type(length) is not int or length < 0:
        raise ValueError(f"{entry.name}: a payload of {length} bytes")
    if length and entry.digest_before == entry.digest_after:
        raise ValueError(f"{entry.name}: a payload for a tensor that did not change")
    return entry, length
