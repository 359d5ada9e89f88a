"""Brings a replica's host copy of the weights to another version: fetch, verify, decode. No engine here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.blobs import BlobStore, get_blob
from slipstream.clock import Clock, SystemClock
from slipstream.delta.container import apply_delta, digests_of, read_info
from slipstream.delta.tensors import RawTensor, Weights, parse_safetensors
from slipstream.errors import ConfigError, IntegrityError, NotFoundError, WrongBaseError
from slipstream.v1.common_pb2 import BlobRef, Version
from slipstream.v1.weights_pb2 import VERSION_KIND_ANCHOR, Manifest, Shard
from slipstream.weights.manifest import tensors_of, version_str

_log = logging.getLogger(__name__)
_FETCHES = 8

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
    """Seconds spent waiting for blobs; decoding goes on while the next ones come."""
    decode_s: float


@dataclass
class _State:
    """Weights on their way from one version to another."""

    weights: dict[str, RawTensor]
    digests: dict[str, str]
    """Digest of every tensor in `weights`."""
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    decode_s: float = 0.0


class Puller:
    """Holds the host copy of what the engine serves."""

    def __init__(self, blobs: BlobStore, plan: Plan, *, clock: Clock | None = None) -> None:
        """
        Args:
            plan: asks weightsync for manifests from (run, version held or None) to (target or None).
        """
        self._blobs, self._plan, self._clock = blobs, plan, clock or SystemClock()
        self._slots = asyncio.Semaphore(_FETCHES)
        self.weights: Weights | None = None
        self.version: Version | None = None
        self.run_id = ""

    def seed(self, weights: Weights) -> None:
        """The base model that the engine loaded; it belongs to no run."""
        self.weights, self.version, self.run_id = weights, None, ""

    async def pull(self, run_id: str, target: Version | None = None) -> Pulled | None:
        """Fetches, verifies and decodes a version; None when the replica holds it already.

        Only shards with a tensor that the replica does not hold yet are fetched. When a delta does not fit
        what the replica holds, or a blob stays damaged or is gone, it goes by way of an anchor. The weights
        held are not touched in any case.

        Raises:
            NotFoundError: there is no such version, or no way to it.
            IntegrityError: even the way through the anchor does not give the promised bytes.
            ConfigError: the version's tensors are not those that the engine loaded.
        """
        have = self.version if self.run_id == run_id else None
        try:
            return await self._follow(run_id, await self._plan(run_id, have, target))
        except (IntegrityError, NotFoundError) as error:
            if have is None:
                raise
            _log.warning("%s; going back to an anchor", error)
        return await self._follow(run_id, await self._plan(run_id, None, target))

    def accept(self, pulled: Pulled) -> None:
        """Says that the engine serves the pulled version now."""
        self.weights, self.version, self.run_id = pulled.weights, pulled.version, pulled.run_id

    async def _follow(self, run_id: str, manifests: Sequence[Manifest]) -> Pulled | None:
        if not manifests:
            return None
        began = self._clock.monotonic()
        held = dict(self.weights or {})
        digests = await asyncio.to_thread(digests_of, held)
        wanted = select(manifests, {n: (t.dtype, t.shape) for n, t in held.items()}, digests)
        state = _State(held, dict(digests), decode_s=self._clock.monotonic() - began)
        await self._apply_all(list(zip(manifests, wanted, strict=True)), state)
        changed = [name for name in state.weights if digests.get(name) != state.digests[name]]
        return Pulled(
            run_id,
            manifests[-1].version,
            state.weights,
            changed,
            state.fetched_bytes,
            state.fetch_s,
            state.decode_s,
        )

    async def _apply_all(self, steps: list[tuple[Manifest, list[Shard]]], state: _State) -> None:
        """Decodes one version while the blobs of the next one come in."""
        coming = asyncio.create_task(self._fetch_all(steps[0][1]))
        try:
            for index, (manifest, shards) in enumerate(steps):
                began = self._clock.monotonic()
                blobs = await coming
                fetched = self._clock.monotonic()
                if index + 1 < len(steps):
                    coming = asyncio.create_task(self._fetch_all(steps[index + 1][1]))
                await asyncio.to_thread(_apply, manifest, shards, blobs, state)
                state.fetch_s += fetched - began
                state.decode_s += self._clock.monotonic() - fetched
                state.fetched_bytes += sum(map(len, blobs))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _fetch_all(self, shards: Sequence[Shard]) -> list[bytes]:
        tasks = [asyncio.create_task(self._fetch(shard.blob)) for shard in shards]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, ref: BlobRef) -> bytes:
        async with self._slots:
            try:
                return await get_blob(self._blobs, ref)
            except (IntegrityError, NotFoundError) as error:
                _log.warning("%s; fetching it again", error)
            return await get_blob(self._blobs, ref)


def select(
    manifests: Sequence[Manifest],
    held: Mapping[str, tuple[str, tuple[int, ...]]],
    digests: Mapping[str, str],
) -> list[list[Shard]]:
    """Per manifest, the shards that must be fetched: those with a tensor that is not there yet. Pure.

    Args:
        held: type and shape of every tensor held; empty when nothing is.
        digests: of the tensors held.

    Raises:
        ConfigError: the version's tensors are not those that are held.
        WrongBaseError: a delta fits neither before nor after it.
    """
    now = dict(digests)
    wanted = []
    for manifest in manifests:
        if held:
            _check_model(manifest, held)
        if manifest.kind != VERSION_KIND_ANCHOR:
            _check_base(manifest, now)
        wanted.append(
            [s for s in manifest.shards if any(now.get(e.name) != e.digest_after for e in s.tensors)]
        )
        now = {entry.name: entry.digest_after for entry in tensors_of(manifest)}
    return wanted


def _check_model(manifest: Manifest, held: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    entries = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in tensors_of(manifest)}
    if entries.keys() != held.keys():
        name = min(entries.keys() ^ held.keys())
        where = "the engine's model" if name in held else f"version {version_str(manifest.version)}"
        raise ConfigError(f"tensor {name!r} is only in {where}: trainer and engine run different models")
    for name, kind in entries.items():
        if kind != held[name]:
            raise ConfigError(
                f"tensor {name!r} is {kind[0]} {list(kind[1])} in version {version_str(manifest.version)}, "
                f"{held[name][0]} {list(held[name][1])} in the engine: they run different models"
            )


def _check_base(manifest: Manifest, digests: Mapping[str, str]) -> None:
    for entry in tensors_of(manifest):
        if digests.get(entry.name) not in (entry.digest_before, entry.digest_after):
            raise WrongBaseError(
                f"tensor {entry.name!r}: the weights held are not those that version "
                f"{version_str(manifest.version)} was made from"
            )


def _apply(manifest: Manifest, shards: Sequence[Shard], blobs: Sequence[bytes], state: _State) -> None:
    """Brings the state to the manifest's version. CPU-bound.

    Raises:
        IntegrityError, WrongBaseError: bytes are not those promised.
    """
    for shard, blob in zip(shards, blobs, strict=True):
        if manifest.kind == VERSION_KIND_ANCHOR:
            _apply_anchor(shard, blob, state)
        else:
            _apply_delta(shard, blob, state)
        state.digests.update((entry.name, entry.digest_after) for entry in shard.tensors)


def _apply_anchor(shard: Shard, blob: bytes, state: _State) -> None:
    stored = parse_safetensors(blob, what=f"anchor blob {shard.blob.key}")
    promised = {entry.name: (entry.dtype, tuple(entry.shape), entry.digest_after) for entry in shard.tensors}
    digests = digests_of(stored)
    if {name: (t.dtype, t.shape, digests[name]) for name, t in stored.items()} != promised:
        raise IntegrityError(f"anchor blob {shard.blob.key} does not hold the tensors of its manifest")
    for name, tensor in stored.items():
        if state.digests.get(name) != digests[name]:
            state.weights[name] = tensor


def _apply_delta(shard: Shard, blob: bytes, state: _State) -> None:
    if read_info(blob).entries != list(shard.tensors):
        raise IntegrityError(f"delta blob {shard.blob.key} does not hold the tensors of its manifest")
    base = {entry.name: state.weights[entry.name] for entry in shard.tensors}
    state.weights.update(apply_delta(base, blob, state.digests))
