"""Objects as files under one directory, for a single machine without an S3 server."""

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from typing_extensions import Buffer

from slipstream.errors import ConfigError, ConflictError, NotFoundError, RetryableError, StoreFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
_TEMPORARY = ".new-"

T = TypeVar("T")


class DirectoryStore:
    """Implements `slipstream.blobs.BlobStore`. A key's parts between slashes are directories."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, key: str, data: Buffer) -> None:
        await self._run(lambda: self._write(key, data, os.replace))

    async def create(self, key: str, data: Buffer) -> None:
        await self._run(lambda: self._create(key, bytes(data)))

    def _create(self, key: str, data: bytes) -> None:
        try:
            # Unlike a rename, a hard link fails when the name is taken.
            self._write(key, data, os.link)
        except FileExistsError:
            if self._path(key).read_bytes() != data:
                raise ConflictError(f"{self._path(key)} exists with other content") from None

    def _write(self, key: str, data: Buffer, publish: Callable[[str, Path], None]) -> None:
        """Writes aside, makes it durable, then gives it its name."""
        path = self._path(key)
        self._require_root()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            publish(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
        _sync_directory(path.parent)

    async def get(self, key: str) -> bytes:
        return await self._run(self._path(key).read_bytes)

    async def size(self, key: str) -> int | None:
        try:
            return await self._run(lambda: self._path(key).stat().st_size)
        except NotFoundError:
            return None

    async def list(self, prefix: str) -> AsyncIterator[str]:
        for key in await self._run(lambda: _keys(self._root, prefix)):
            yield key

    async def delete(self, key: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self._run(self._path(key).unlink)

    async def ping(self) -> None:
        await self._run(self._require_root)

    def _require_root(self) -> None:
        if not self._root.is_dir():
            raise ConfigError(f"the object store's directory {self._root} does not exist")

    async def ensure_bucket(self) -> None:
        await self._run(lambda: self._root.mkdir(parents=True, exist_ok=True))

    async def close(self) -> None:
        return

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(parts) or any(part in (".", "..") or part.startswith(_TEMPORARY) for part in parts):
            raise ConfigError(f"{key!r} cannot be an object's key")
        return self._root.joinpath(*parts)

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(call)
        except OSError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: OSError) -> Exception:
        text = f"{error.filename or self._root}: {error.strerror}"
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            return NotFoundError(f"{error.filename} does not exist")
        if error.errno in _FULL:
            return StoreFullError(f"the object store has no room left: {text}")
        if error.errno in _REFUSED:
            return ConfigError(f"the object store cannot be used: {text}")
        return RetryableError(text)


def _keys(root: Path, prefix: str) -> list[str]:
    keys = (
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, _, names in os.walk(root / prefix.rpartition("/")[0])
        for name in names
        if not name.startswith(_TEMPORARY)
    )
    return sorted(key for key in keys if key.startswith(prefix))


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
