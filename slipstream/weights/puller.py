"""Brings a replica's host copy of the weights to another version: fetch, verify, decode. No engine here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slipstream.blobs import BlobStore, get_blob
from slipstream.clock import Clock, SystemClock
from slipstream.delta.container import apply_delta, parallel
from slipstream.delta.tensors import RawTensor, Weights, digest, parse_safetensors
from slipstream.errors import ConfigError, IntegrityError, NotFoundError
from slipstream.v1.common_pb2 import BlobRef, Version
from slipstream.v1.weights_pb2 import VERSION_KIND_ANCHOR, Manifest, Shard
from slipstream.weights.manifest import tensors_of, version_str

_log = logging.getLogger(__name__)

Plan = Callable[[str, Version | None, Version | None], Awaitable[Sequence[Manifest]]]


@dataclass(frozen=True)
class Pulled:
    """A version, decoded and verified, that the engine does not serve yet."""

    run_id: str
    version: Version
    weights: Weights
    """Every tensor; those that did not change are the very objects of the former weights."""
    changed: list[str]
    """Names of the tensors that did."""
    fetched_bytes: int
    fetch_s: float
    decode_s: float


class Puller:
    """Holds the host copy of what the engine serves."""

    def __init__(self, blobs: BlobStore, plan: Plan, *, clock: Clock | None = None) -> None:
        """
        Args:
            plan: asks weightsync for manifests from (run, version held or None) to (target or None).
        """
        self._blobs, self._plan, self._clock = blobs, plan, clock or SystemClock()
        self.weights: Weights | None = None
        self.version: Version | None = None
        self.run_id = ""

    def seed(self, weights: Weights) -> None:
        """The base model that the engine loaded; it belongs to no run."""
        self.weights, self.version, self.run_id = weights, None, ""

    async def pull(self, run_id: str, target: Version | None = None) -> Pulled | None:
        """Fetches, verifies and decodes a version; None when the replica holds it already.

        When a delta does not fit what the replica holds, or a blob stays damaged or is gone, it goes by
        way of an anchor.

        Raises:
            NotFoundError: there is no such version, or no way to it.
            IntegrityError: even the way through the anchor does not give the promised bytes.
            ConfigError: the version's tensors are not those that the engine loaded.
        """
        have = self.version if self.run_id == run_id else None
        try:
            manifests = await self._plan(run_id, have, target)
            return await self._apply(run_id, manifests)
        except (IntegrityError, NotFoundError) as error:
            if have is None:
                raise
            _log.warning("%s; going back to an anchor", error)
        return await self._apply(run_id, await self._plan(run_id, None, target))

    def accept(self, pulled: Pulled) -> None:
        """Says that the engine serves the pulled version now."""
        self.weights, self.version, self.run_id = pulled.weights, pulled.version, pulled.run_id

    async def _apply(self, run_id: str, manifests: Sequence[Manifest]) -> Pulled | None:
        if not manifests:
            return None
        weights, size, fetch_s, decode_s = self.weights, 0, 0.0, 0.0
        for manifest in manifests:
            began = self._clock.monotonic()
            blobs = await asyncio.gather(*(self._fetch(shard.blob) for shard in manifest.shards))
            fetched = self._clock.monotonic()
            weights = await asyncio.to_thread(decode, manifest, blobs, weights)
            fetch_s += fetched - began
            decode_s += self._clock.monotonic() - fetched
            size += sum(map(len, blobs))
        assert weights is not None
        held = self.weights or {}
        changed = [name for name, tensor in weights.items() if held.get(name) is not tensor]
        return Pulled(run_id, manifests[-1].version, weights, changed, size, fetch_s, decode_s)

    async def _fetch(self, ref: BlobRef) -> bytes:
        try:
            return await get_blob(self._blobs, ref)
        except IntegrityError as error:
            _log.warning("%s; fetching it again", error)
        return await get_blob(self._blobs, ref)


def decode(manifest: Manifest, blobs: Sequence[bytes], held: Weights | None) -> dict[str, RawTensor]:
    """Weights of a version from its blobs and the weights held. CPU-bound.

    Tensors of an anchor that the replica holds already are taken from `held`, so that their identity says
    that nothing changed.

    Raises:
        IntegrityError, WrongBaseError: bytes are not those promised.
        ConfigError: the tensors are not those held.
    """
    anchor = manifest.kind == VERSION_KIND_ANCHOR
    if held is not None:
        _check_names(manifest, held)
    elif not anchor:
        raise IntegrityError(f"version {version_str(manifest.version)} is a delta, and nothing is held")
    weights: dict[str, RawTensor] = {}
    for shard, blob in zip(manifest.shards, blobs, strict=True):
        if anchor:
            weights.update(_from_anchor(shard, blob, held or {}))
        else:
            assert held is not None
            weights.update(apply_delta({e.name: held[e.name] for e in shard.tensors}, blob))
    _check_promises(manifest, weights, verified=not anchor)
    return {name: weights[name] for name in (held or weights)}


def _from_anchor(shard: Shard, blob: bytes, held: Weights) -> dict[str, RawTensor]:
    stored = parse_safetensors(blob, what=f"anchor blob {shard.blob.key}")
    promised = {entry.name: entry.digest_after for entry in shard.tensors}
    if stored.keys() != promised.keys():
        raise IntegrityError(f"anchor blob {shard.blob.key} does not hold the tensors of its manifest")

    def choose(name: str) -> RawTensor:
        tensor = stored[name]
        if digest(tensor.data) != promised[name]:
            raise IntegrityError(f"anchor blob {shard.blob.key}: tensor {name!r} has not the promised digest")
        mine = held.get(name)
        same = (
            mine is not None
            and (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape)
            and mine.data.nbytes == tensor.data.nbytes
            and digest(mine.data) == promised[name]
        )
        return mine if same and mine is not None else tensor

    return dict(zip(stored, parallel(choose, stored), strict=True))


def _check_names(manifest: Manifest, held: Weights) -> None:
    names = {entry.name for entry in tensors_of(manifest)}
    if names != held.keys():
        name = min(names ^ held.keys())
        where = "the engine's model" if name in held else f"version {version_str(manifest.version)}"
        raise ConfigError(f"tensor {name!r} is only in {where}: trainer and engine run different models")
    for entry in tensors_of(manifest):
        mine = held[entry.name]
        if (mine.dtype, mine.shape) != (entry.dtype, tuple(entry.shape)):
            raise ConfigError(
                f"tensor {entry.name!r} is {entry.dtype} {tuple(entry.shape)} in the version and "
                f"{mine.dtype} {mine.shape} in the engine: trainer and engine run different models"
            )


def _check_promises(manifest: Manifest, weights: Weights, *, verified: bool) -> None:
    """A delta file's own digests were checked when it was applied; here, that they are the manifest's."""
    entries = list(tensors_of(manifest))
    if {entry.name for entry in entries} != weights.keys():
        raise IntegrityError(f"the blobs of version {version_str(manifest.version)} hold other tensors")
    if not verified:
        return

    def check(index: int) -> None:
        entry = entries[index]
        if digest(weights[entry.name].data) != entry.digest_after:
            raise IntegrityError(f"tensor {entry.name!r} has not the digest that its manifest promises")

    parallel(check, range(len(entries)))
