"""The versions of all runs, as the store holds them."""

import asyncio
import secrets

from slipstream.blobs import BlobStore
from slipstream.errors import ConfigError, ConflictError, FencedError, IntegrityError, NotFoundError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import VERSION_KIND_DELTA, Manifest
from slipstream.weights.manifest import (
    check_follows,
    check_manifest,
    check_run_id,
    epoch_key,
    not_found,
    order,
    parse_manifest,
    pin_key,
    version_key,
    version_str,
    versions_prefix,
)


class Catalog:
    """Reads and creates manifests, epochs and pins. Manifests never change, so they are kept once read."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._manifests: dict[str, Manifest] = {}

    async def open_epoch(self, run_id: str) -> int:
        """Creates the next epoch of a run and returns it."""
        check_run_id(run_id)
        epoch = await self.newest_epoch(run_id) + 1
        while True:
            try:
                # The content only has to differ between rivals: create() takes equal bytes for a retry.
                await self._store.create(epoch_key(run_id, epoch), secrets.token_bytes(16))
                return epoch
            except ConflictError:
                epoch += 1

    async def newest_epoch(self, run_id: str) -> int:
        """Newest epoch of a run, 0 when it has none."""
        prefix = epoch_key(run_id, 0)[:-8]
        keys = [key async for key in self._store.list(prefix)]
        return int(keys[-1][-8:]) if keys else 0

    async def commit(self, manifest: Manifest) -> tuple[str, bool]:
        """Creates a manifest; returns its key, and whether the same one was there already.

        Raises:
            ConfigError: it contradicts itself, its parent, or its blobs.
            NotFoundError: a blob or the parent is missing.
            FencedError: its epoch is over.
            ConflictError: another manifest of this version is there.
        """
        check_manifest(manifest)
        await self._check_epoch(manifest)
        if manifest.kind == VERSION_KIND_DELTA:
            check_follows(manifest, await self.get(manifest.run_id, manifest.parent))
        await asyncio.gather(
            *(self._check_blob(shard.blob.key, shard.blob.size_bytes) for shard in manifest.shards)
        )
        key = version_key(manifest.run_id, manifest.version)
        known = await self._store.size(key) is not None
        try:
            await self._store.create(key, manifest.SerializeToString(deterministic=True))
        except ConflictError:
            raise ConflictError(
                f"run {manifest.run_id}: version {version_str(manifest.version)} was published by another"
            ) from None
        self._manifests[key] = manifest
        return key, known

    async def _check_epoch(self, manifest: Manifest) -> None:
        newest = await self.newest_epoch(manifest.run_id)
        if manifest.version.epoch < newest:
            raise FencedError(
                f"run {manifest.run_id} is in epoch {newest}: the trainer of epoch {manifest.version.epoch} "
                "was replaced and must stop"
            )
        if manifest.version.epoch > newest:
            raise ConfigError(f"run {manifest.run_id} has no epoch {manifest.version.epoch}; open it first")

    async def _check_blob(self, key: str, size_bytes: int) -> None:
        found = await self._store.size(key)
        if found is None:
            raise NotFoundError(f"blob {key} is not in the store; upload blobs before committing")
        if found != size_bytes:
            raise ConfigError(f"blob {key} has {found} bytes in the store, {size_bytes} in the manifest")

    async def get(self, run_id: str, version: Version) -> Manifest:
        """One manifest.

        Raises:
            NotFoundError: there is no such version.
            IntegrityError: it is damaged.
        """
        key = version_key(check_run_id(run_id), version)
        try:
            return await self._read(key)
        except NotFoundError:
            raise not_found(run_id, version) from None

    async def all(self, run_id: str) -> list[Manifest]:
        """All readable manifests of a run, oldest first."""
        keys = [key async for key in self._store.list(versions_prefix(check_run_id(run_id)))]
        found = await asyncio.gather(*map(self._read, keys), return_exceptions=True)
        manifests = []
        for each in found:
            if isinstance(each, Manifest):
                manifests.append(each)
            elif not isinstance(each, (NotFoundError, IntegrityError)):
                raise each
        return sorted(manifests, key=lambda m: order(m.version))

    async def _read(self, key: str) -> Manifest:
        if key not in self._manifests:
            self._manifests[key] = parse_manifest(await self._store.get(key), key)
        return self._manifests[key]

    async def pin(self, run_id: str, version: Version, pinned: bool) -> None:
        """Pins a version or lets it go; both may be repeated.

        Raises:
            NotFoundError: there is no such version.
        """
        await self.get(run_id, version)
        if pinned:
            await self._store.create(pin_key(run_id, version), b"pinned")
        else:
            await self._store.delete(pin_key(run_id, version))

    async def pins(self, run_id: str) -> set[tuple[int, int]]:
        """Versions that are pinned."""
        keys = [key async for key in self._store.list(f"runs/{run_id}/pins/")]
        pairs = (key.rpartition("/")[2].split("-") for key in keys)
        return {(int(epoch), int(number)) for epoch, number in pairs}
