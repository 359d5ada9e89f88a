"""Delta files: the difference between two sets of named tensors. The format is in `format.md`."""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from typing import Any, TypeVar

import numpy as np
import xxhash

from slipstream.delta.codec import get_codec
from slipstream.delta.tensors import Buffer, RawTensor, Weights, digest
from slipstream.errors import ConfigError, IntegrityError, WrongBaseError
from slipstream.v1.weights_pb2 import TensorEntry

MAGIC = b"SLPDELTA"
FORMAT = 1
_FIXED = len(MAGIC) + 4 + 8 + 8
_MAX_HEADER = 256 * 1024 * 1024

A = TypeVar("A")
B = TypeVar("B")


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

    Raises:
        ConfigError: a tensor is missing or extra, or changed its shape or type; or the codec is unknown.
    """
    check_same_tensors(old, new)
    get_codec(codec)

    def encode(name: str) -> tuple[TensorEntry, bytes]:
        before, after = old[name], new[name]
        entry = TensorEntry(
            name=name,
            dtype=after.dtype,
            shape=after.shape,
            codec=codec,
            digest_before=digest(before.data),
            digest_after=digest(after.data),
        )
        if entry.digest_before == entry.digest_after:
            return entry, b""
        return entry, get_codec(codec).encode(before.data, after.data, after.itemsize)

    encoded = parallel(encode, new)
    entries = [entry for entry, _ in encoded]
    return _assemble(entries, [payload for _, payload in encoded], metadata or {}), entries


def apply_delta(old: Weights, blob: Buffer) -> dict[str, RawTensor]:
    """The tensors that a delta file leads to, each checked against its digest; `old` is not changed.

    A tensor that already has the new digest is taken as it is, so applying twice is harmless. CPU-bound.

    Returns:
        The tensors named in the file, in its order; unchanged ones are the very objects of `old`.

    Raises:
        WrongBaseError: a tensor's bytes are neither those before nor those after.
        IntegrityError: the file is damaged.
        ConfigError: a tensor is missing, extra, or has another shape or type.
    """
    info = read_info(blob)
    view = memoryview(blob)
    _check_fits(old, info.entries)

    def apply(item: tuple[TensorEntry, tuple[int, int]]) -> tuple[str, RawTensor]:
        entry, (offset, length) = item
        tensor = old[entry.name]
        found = digest(tensor.data)
        if found == entry.digest_after:
            return entry.name, tensor
        if found != entry.digest_before:
            raise WrongBaseError(
                f"tensor {entry.name!r}: these are not the weights that the delta was made from "
                f"(digest {found}, expected {entry.digest_before})"
            )
        out = np.empty_like(tensor.data)
        get_codec(entry.codec).decode(tensor.data, view[offset : offset + length], tensor.itemsize, out)
        if digest(out) != entry.digest_after:
            raise IntegrityError(f"tensor {entry.name!r}: decoded bytes do not have the promised digest")
        return entry.name, RawTensor(tensor.dtype, tensor.shape, out)

    return dict(parallel(apply, zip(info.entries, info.spans, strict=True)))


def read_info(blob: Buffer) -> DeltaInfo:
    """Header of a delta file.

    Raises:
        IntegrityError: not a delta file, damaged, or of a newer format.
    """
    view = memoryview(blob).cast("B")
    if view.nbytes < _FIXED or bytes(view[:8]) != MAGIC:
        raise IntegrityError("not a delta file")
    version = int.from_bytes(view[8:12], "little")
    if version != FORMAT:
        raise IntegrityError(f"delta format {version} is not known here (known: {FORMAT}); update Slipstream")
    length = int.from_bytes(view[12:20], "little")
    if length > min(view.nbytes - _FIXED, _MAX_HEADER):
        raise IntegrityError("the delta file is cut short")
    text = view[_FIXED : _FIXED + length]
    if xxhash.xxh3_64_digest(text) != bytes(view[20:28]):
        raise IntegrityError("the delta file's header is damaged")
    return _parse_header(json.loads(bytes(text)), _FIXED + length, view.nbytes)


def check_same_tensors(old: Weights, new: Weights) -> None:
    """Checks that two sets of weights hold tensors of the same names, shapes and types.

    Raises:
        ConfigError: names the first difference.
    """
    if missing := sorted(old.keys() - new.keys()):
        raise ConfigError(f"tensor {missing[0]!r} is missing in the new weights ({len(missing)} in all)")
    if extra := sorted(new.keys() - old.keys()):
        raise ConfigError(f"tensor {extra[0]!r} is not in the old weights ({len(extra)} in all)")
    for name, tensor in new.items():
        before = old[name]
        if before.shape != tensor.shape:
            raise ConfigError(f"tensor {name!r} changed its shape from {before.shape} to {tensor.shape}")
        if before.dtype != tensor.dtype:
            raise ConfigError(f"tensor {name!r} changed its type from {before.dtype} to {tensor.dtype}")


def parallel(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Maps over items in threads, keeping the order; numpy, zstd and xxhash let go of the interpreter."""
    with ThreadPoolExecutor(max_workers=cpu_count() or 1) as pool:
        return list(pool.map(function, items))


def _check_fits(old: Weights, entries: list[TensorEntry]) -> None:
    for entry in entries:
        tensor = old.get(entry.name)
        if tensor is None:
            raise ConfigError(f"tensor {entry.name!r} of the delta is missing in the weights")
        if tensor.shape != tuple(entry.shape):
            raise ConfigError(
                f"tensor {entry.name!r} has the shape {tensor.shape}, the delta is for {tuple(entry.shape)}"
            )
        if tensor.dtype != entry.dtype:
            raise ConfigError(f"tensor {entry.name!r} is {tensor.dtype}, the delta is for {entry.dtype}")


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
    header: dict[str, Any] = {"tensors": tensors}
    if metadata:
        header["metadata"] = dict(metadata)
    text = json.dumps(header, separators=(",", ":")).encode()
    fixed = MAGIC + FORMAT.to_bytes(4, "little") + len(text).to_bytes(8, "little")
    return b"".join([fixed, xxhash.xxh3_64_digest(text), text, *payloads])


def _parse_header(header: Any, start: int, total: int) -> DeltaInfo:
    entries: list[TensorEntry] = []
    spans: list[tuple[int, int]] = []
    offset = start
    try:
        for item in header["tensors"]:
            entries.append(
                TensorEntry(
                    name=item["name"],
                    dtype=item["dtype"],
                    shape=item["shape"],
                    codec=item["codec"],
                    digest_before=item["before"],
                    digest_after=item["after"],
                )
            )
            spans.append((offset, item["bytes"]))
            offset += item["bytes"]
        metadata = {str(k): str(v) for k, v in header.get("metadata", {}).items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise IntegrityError(f"the delta file's header is malformed: {error}") from None
    if offset != total:
        raise IntegrityError(f"the delta file has {total} bytes, its header speaks of {offset}")
    return DeltaInfo(entries, spans, metadata)
