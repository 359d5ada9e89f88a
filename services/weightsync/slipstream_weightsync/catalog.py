"""The versions of all runs, as the store holds them."""

import asyncio
import logging
import secrets
from collections import OrderedDict

from slipstream.blobs import BlobStore, blob_key
from slipstream.errors import ConfigError, ConflictError, FencedError, IntegrityError, NotFoundError
from slipstream.v1.common_pb2 import BlobRef, Version
from slipstream.v1.weights_pb2 import VERSION_KIND_ANCHOR, VERSION_KIND_DELTA, Manifest
from slipstream.weights.manifest import (
    check_follows,
    check_manifest,
    check_run_id,
    epoch_key,
    not_found,
    order,
    parse_manifest,
    parse_version,
    pin_key,
    version_key,
    version_str,
    versions_prefix,
)

_log = logging.getLogger(__name__)
_KEPT = 512
_READS = 16


class Catalog:
    """Reads and creates manifests, epochs and pins. Manifests never change, so the last ones are kept."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._slots = asyncio.Semaphore(_READS)

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
        key = version_key(manifest.run_id, manifest.version)
        data = manifest.SerializeToString(deterministic=True)
        known = await self._store.size(key) is not None
        if not known:
            await self._check_new(manifest)
        try:
            await self._store.create(key, data)
        except ConflictError:
            raise ConflictError(
                f"run {manifest.run_id}: someone else published version {version_str(manifest.version)}"
            ) from None
        # Another instance may have opened an epoch meanwhile. The manifest then stays, in an epoch that
        # nobody goes on from, and is not announced.
        await self._check_epoch(manifest)
        self._keep(key, manifest)
        return key, known

    async def _check_new(self, manifest: Manifest) -> None:
        """What must hold for a version that is not there yet."""
        newest = await self.newest(manifest.run_id)
        if newest is not None and order(newest) >= order(manifest.version):
            raise ConfigError(
                f"run {manifest.run_id} is at version {version_str(newest)}; "
                f"{version_str(manifest.version)} would go backwards"
            )
        if manifest.kind == VERSION_KIND_DELTA:
            check_follows(manifest, await self.get(manifest.run_id, manifest.parent))
        await asyncio.gather(*(self._check_blob(shard.blob) for shard in manifest.shards))

    async def _check_epoch(self, manifest: Manifest) -> None:
        newest = await self.newest_epoch(manifest.run_id)
        if manifest.version.epoch < newest:
            raise FencedError(
                f"run {manifest.run_id} is in epoch {newest}: the trainer of epoch {manifest.version.epoch} "
                "was replaced and must stop"
            )
        if manifest.version.epoch > newest:
            raise ConfigError(f"run {manifest.run_id} has no epoch {manifest.version.epoch}; open it first")

    async def _check_blob(self, blob: BlobRef) -> None:
        if blob.key != blob_key(blob.sha256):
            raise ConfigError(f"blob {blob.key} is not under the key of its content hash {blob.sha256}")
        async with self._slots:
            found = await self._store.size(blob.key)
        if found is None:
            raise NotFoundError(f"blob {blob.key} is not in the store; upload blobs before committing")
        if found != blob.size_bytes:
            raise ConfigError(
                f"blob {blob.key} has {found} bytes in the store, {blob.size_bytes} in the manifest"
            )

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

    async def newest(self, run_id: str) -> Version | None:
        """Newest version of a run; None when it has none."""
        versions = await self.versions(run_id)
        return versions[-1] if versions else None

    async def versions(self, run_id: str) -> list[Version]:
        """Versions of a run, oldest first."""
        prefix = versions_prefix(check_run_id(run_id))
        found = []
        async for key in self._store.list(prefix):
            try:
                found.append(parse_version(key.removeprefix(prefix)))
            except ConfigError:
                _log.warning("%s is no manifest of ours; passing over it", key)
        return sorted(found, key=order)

    async def runs(self) -> list[str]:
        """Runs that have an epoch."""
        return sorted({key.split("/")[1] async for key in self._store.list("runs/")})

    async def all(self, run_id: str) -> list[Manifest]:
        """All readable manifests of a run, oldest first."""
        versions = await self.versions(run_id)
        found = await asyncio.gather(*(self._try_get(run_id, version) for version in versions))
        return [manifest for manifest in found if manifest is not None]

    async def towards(self, run_id: str, have: Version | None, target: Version | None) -> list[Manifest]:
        """Manifests among which the cheapest way to the target is: from it back to what the replica holds
        or to an anchor. Nothing else is read, so that a long run costs no more than a short one."""
        at = target or await self.newest(run_id)
        path: list[Manifest] = []
        while at is not None and (manifest := await self._try_get(run_id, at)) is not None:
            path.append(manifest)
            if manifest.kind == VERSION_KIND_ANCHOR or (have is not None and manifest.parent == have):
                break
            at = manifest.parent
        return path

    async def _try_get(self, run_id: str, version: Version) -> Manifest | None:
        try:
            return await self.get(run_id, version)
        except IntegrityError as error:
            _log.warning("%s", error)
        except NotFoundError:
            pass
        return None

    async def _read(self, key: str) -> Manifest:
        manifest = self._manifests.get(key)
        if manifest is None:
            async with self._slots:
                manifest = parse_manifest(await self._store.get(key), key)
        self._keep(key, manifest)
        return manifest

    def _keep(self, key: str, manifest: Manifest) -> None:
        self._manifests[key] = manifest
        self._manifests.move_to_end(key)
        if len(self._manifests) > _KEPT:
            self._manifests.popitem(last=False)

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
