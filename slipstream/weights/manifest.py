"""Versions, their keys in the store, and what makes a manifest valid."""

import re
from collections.abc import Iterator

from slipstream.delta.tensors import tensor_bytes
from slipstream.errors import ConfigError, IntegrityError, NotFoundError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import (
    VERSION_KIND_ANCHOR,
    VERSION_KIND_DELTA,
    Manifest,
    TensorEntry,
)

FORMAT = 1
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


def check_run_id(run_id: str) -> str:
    """Returns the id.

    Raises:
        ConfigError: it has characters that a key cannot hold, or a bad length.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run name {run_id!r}: use 1 to 100 of a-z 0-9 . _ -, beginning with a letter or a digit"
        )
    return run_id


def order(version: Version) -> tuple[int, int]:
    """Sort key: epoch first, then number."""
    return version.epoch, version.number


def version_str(version: Version) -> str:
    """`<epoch>-<number>`, as people write it."""
    return f"{version.epoch}-{version.number}"


def parse_version(text: str) -> Version:
    """Inverse of `version_str`.

    Raises:
        ConfigError: the text is no version.
    """
    match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a version; write <epoch>-<number>, for example 1-12")
    return Version(epoch=int(match[1]), number=int(match[2]))


def versions_prefix(run_id: str) -> str:
    return f"runs/{run_id}/versions/"


def version_key(run_id: str, version: Version) -> str:
    """Key of a manifest; lexicographic order is version order."""
    return f"{versions_prefix(run_id)}{version.epoch:08d}-{version.number:012d}"


def epoch_key(run_id: str, epoch: int) -> str:
    """Key whose existence says that the epoch has begun."""
    return f"runs/{run_id}/epochs/{epoch:08d}"


def pin_key(run_id: str, version: Version) -> str:
    """Key whose existence says that the version is pinned."""
    return f"runs/{run_id}/pins/{version.epoch:08d}-{version.number:012d}"


def tensors_of(manifest: Manifest) -> Iterator[TensorEntry]:
    """All tensors of all shards."""
    for shard in manifest.shards:
        yield from shard.tensors


def size_of(manifest: Manifest) -> int:
    """Bytes of all blobs."""
    return sum(shard.blob.size_bytes for shard in manifest.shards)


def parse_manifest(data: bytes, key: str) -> Manifest:
    """A stored manifest.

    Raises:
        IntegrityError: it is damaged or contradicts itself.
    """
    try:
        manifest = Manifest.FromString(data)
    except Exception:
        raise IntegrityError(f"manifest {key} is damaged") from None
    try:
        check_manifest(manifest)
    except ConfigError as error:
        raise IntegrityError(f"manifest {key}: {error}") from None
    if version_key(manifest.run_id, manifest.version) != key:
        raise IntegrityError(f"manifest {key} is for {manifest.run_id} {version_str(manifest.version)}")
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Checks what can be checked without the store.

    Raises:
        ConfigError: says what contradicts what.
    """
    check_run_id(manifest.run_id)
    if manifest.format != FORMAT:
        raise ConfigError(f"manifest format {manifest.format} is not known here (known: {FORMAT})")
    if manifest.version.epoch < 1 or manifest.version.number < 0:
        raise ConfigError(f"{version_str(manifest.version)} is not a version")
    delta = manifest.kind == VERSION_KIND_DELTA
    if not delta and manifest.kind != VERSION_KIND_ANCHOR:
        raise ConfigError("a version is an anchor or a delta")
    if delta != manifest.HasField("parent"):
        raise ConfigError("a delta names its parent, an anchor has none")
    if delta and order(manifest.parent) >= order(manifest.version):
        raise ConfigError(
            f"the parent {version_str(manifest.parent)} is not older than {version_str(manifest.version)}"
        )
    _check_tensors(manifest, delta)


def _check_tensors(manifest: Manifest, delta: bool) -> None:
    seen: set[str] = set()
    size = 0
    for tensor in tensors_of(manifest):
        if tensor.name in seen:
            raise ConfigError(f"tensor {tensor.name!r} is named twice")
        seen.add(tensor.name)
        if not tensor.digest_after or bool(tensor.digest_before) != delta or bool(tensor.codec) != delta:
            raise ConfigError(f"tensor {tensor.name!r} lacks, or must not have, a digest before or a codec")
        size += tensor_bytes(tensor.dtype, tensor.shape)
    if not seen:
        raise ConfigError("a version must hold tensors")
    if size != manifest.full_size_bytes:
        raise ConfigError(f"the tensors take {size} bytes, full_size_bytes is {manifest.full_size_bytes}")


def check_follows(manifest: Manifest, parent: Manifest) -> None:
    """Checks that a delta leads on from its parent.

    Raises:
        ConfigError: names the first tensor that does not fit.
    """
    before = {tensor.name: tensor for tensor in tensors_of(parent)}
    for tensor in tensors_of(manifest):
        base = before.pop(tensor.name, None)
        if base is None:
            raise ConfigError(f"tensor {tensor.name!r} is not in the parent")
        if (base.dtype, list(base.shape)) != (tensor.dtype, list(tensor.shape)):
            raise ConfigError(f"tensor {tensor.name!r} has another type or shape than in the parent")
        if base.digest_after != tensor.digest_before:
            raise ConfigError(f"tensor {tensor.name!r} does not begin where the parent ends")
    if before:
        raise ConfigError(f"tensor {min(before)!r} of the parent is missing")


def not_found(run_id: str, version: Version) -> NotFoundError:
    return NotFoundError(f"run {run_id} has no version {version_str(version)}")
