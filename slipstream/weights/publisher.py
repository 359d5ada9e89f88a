"""Publishes versions: blobs durable, then the manifest, and only then the reference moves on."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.blobs import BlobStore, put_blob
from slipstream.clock import Clock, SystemClock
from slipstream.delta.container import check_same_tensors, digests_of, encode_delta, parallel
from slipstream.delta.tensors import Weights, safetensors_bytes, size_bytes
from slipstream.errors import ConfigError, IntegrityError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import (
    KV_CACHE_POLICY_KEEP,
    VERSION_KIND_ANCHOR,
    VERSION_KIND_DELTA,
    Canary,
    KvCachePolicy,
    Manifest,
    Shard,
    TensorEntry,
)
from slipstream.weights.manifest import FORMAT, order, size_of, tensors_of, version_str
from slipstream.weights.shards import split


@dataclass(frozen=True)
class Published:
    """A version that replicas can fetch."""

    manifest: Manifest
    size_bytes: int
    """Bytes of its blobs."""
    full_bytes: int
    """Bytes of the full weights."""
    changed: float
    """Share of elements whose bits changed; 1 for an anchor."""
    encode_s: float
    upload_s: float
    commit_s: float


class Publisher:
    """Knows what replicas hold (`reference`) and publishes differences to it.

    Weights that are handed over become the reference, without a copy. Writing to them afterwards is found
    out at the next delta, and refused.

    A publication that failed can be repeated: the same weights make the same manifest, down to its time, so
    a commit whose answer was lost is recognised.
    """

    def __init__(
        self,
        blobs: BlobStore,
        commit: Callable[[Manifest], Awaitable[None]],
        run_id: str,
        *,
        num_shards: int = 1,
        codec: str = "xor-zstd",
        kv_cache: KvCachePolicy = KV_CACHE_POLICY_KEEP,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            commit: creates the manifest; raises ConflictError or FencedError when it must not exist.
            kv_cache: what replicas do with the KV cache at a swap; every manifest says it.
        """
        self._blobs, self._commit, self._run_id = blobs, commit, run_id
        self._num_shards, self._codec, self._kv_cache = num_shards, codec, kv_cache
        self._clock = clock or SystemClock()
        self.reference: Weights | None = None
        self.version: Version | None = None
        self._digests: dict[str, str] = {}
        """Digest of every tensor of the reference when it was published."""
        self._attempt: Manifest | None = None
        """Manifest whose commit was tried last and did not succeed."""

    async def publish_anchor(
        self, version: Version, weights: Weights, canaries: Sequence[Canary] = ()
    ) -> Published:
        """Publishes a full snapshot.

        Args:
            canaries: what the trainer makes of fixed texts at this version; none means no gate.
        """
        return await self._publish(version, weights, None, canaries)

    async def publish_delta(
        self, version: Version, weights: Weights, canaries: Sequence[Canary] = ()
    ) -> Published:
        """Publishes the difference to the reference.

        Args:
            canaries: see `publish_anchor`.

        Raises:
            ConfigError: nothing was published before, the version is not newer, or tensors differ in name,
                shape or type.
            IntegrityError: the reference was written to.
            ConflictError: someone else published this version.
            FencedError: another trainer has taken the run over.
        """
        if self.reference is None:
            raise ConfigError("a delta needs an anchor before it")
        if self.version is not None and order(version) <= order(self.version):
            raise ConfigError(
                f"version {version_str(version)} is not newer than the published {version_str(self.version)}"
            )
        check_same_tensors(self.reference, weights)
        return await self._publish(version, weights, self.reference, canaries)

    async def _publish(
        self, version: Version, weights: Weights, old: Weights | None, canaries: Sequence[Canary]
    ) -> Published:
        began = self._clock.monotonic()
        encoded = await asyncio.to_thread(self._encode, weights, old)
        changed = await asyncio.to_thread(changed_share, old, weights) if old is not None else 1.0
        encode_s = self._clock.monotonic() - began

        began = self._clock.monotonic()
        refs = await asyncio.gather(*(put_blob(self._blobs, data, sha256=sha) for data, sha, _ in encoded))
        upload_s = self._clock.monotonic() - began

        shards = [Shard(blob=ref, tensors=e) for ref, (_, _, e) in zip(refs, encoded, strict=True)]
        manifest = self._manifest(version, shards, weights, old, canaries)
        self._attempt = manifest
        began = self._clock.monotonic()
        await self._commit(manifest)
        commit_s = self._clock.monotonic() - began
        self.reference, self.version, self._attempt = weights, version, None
        self._digests = {entry.name: entry.digest_after for entry in tensors_of(manifest)}
        size = size_of(manifest)
        return Published(manifest, size, size_bytes(weights), changed, encode_s, upload_s, commit_s)

    def _manifest(
        self,
        version: Version,
        shards: list[Shard],
        weights: Weights,
        old: Weights | None,
        canaries: Sequence[Canary],
    ) -> Manifest:
        manifest = Manifest(
            format=FORMAT,
            run_id=self._run_id,
            version=version,
            kind=VERSION_KIND_ANCHOR if old is None else VERSION_KIND_DELTA,
            parent=None if old is None else self.version,
            shards=shards,
            full_size_bytes=size_bytes(weights),
            created_unix_s=self._clock.unix(),
            canaries=canaries,
            kv_cache=self._kv_cache,
        )
        if self._attempt is not None:
            again = Manifest()
            again.CopyFrom(manifest)
            again.created_unix_s = self._attempt.created_unix_s
            if again == self._attempt:
                return again
        return manifest

    def _encode(self, weights: Weights, old: Weights | None) -> list[tuple[bytes, str, list[TensorEntry]]]:
        """(bytes, SHA-256, entries) per shard."""
        result = []
        for shard in split(weights, self._num_shards):
            if old is None:
                data, entries = safetensors_bytes(shard, {"format": "pt"}), anchor_entries(shard)
            else:
                data, entries = encode_delta({name: old[name] for name in shard}, shard, self._codec)
                self._check_reference(entries)
            result.append((data, hashlib.sha256(data).hexdigest(), entries))
        return result

    def _check_reference(self, entries: list[TensorEntry]) -> None:
        for entry in entries:
            if entry.digest_before != self._digests[entry.name]:
                raise IntegrityError(
                    f"tensor {entry.name!r} was written to after its version was published; "
                    "hand over arrays that nothing else writes to"
                )


def anchor_entries(weights: Weights) -> list[TensorEntry]:
    """Entries of an anchor's shard."""

    digests = digests_of(weights)
    return [
        TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, digest_after=digests[name])
        for name, tensor in weights.items()
    ]


def changed_share(old: Weights, new: Weights) -> float:
    """Share of elements whose bits differ."""

    def count(name: str) -> tuple[int, int]:
        size = new[name].itemsize
        a, b = old[name].data.reshape(-1, size), new[name].data.reshape(-1, size)
        if size in (2, 4, 8):
            kind = f"<u{size}"
            return int(np.count_nonzero(a.view(kind) != b.view(kind))), len(a)
        return int(np.count_nonzero((a != b).any(axis=1))), len(a)

    counts = parallel(count, new)
    total = sum(elements for _, elements in counts)
    return sum(changed for changed, _ in counts) / total if total else 0.0
