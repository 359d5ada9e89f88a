"""Objects in this process, for tests and simulations."""

from collections.abc import AsyncIterator

from typing_extensions import Buffer

from slipstream.errors import ConflictError, NotFoundError


class MemoryStore:
    """Implements `slipstream.blobs.BlobStore`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def put(self, key: str, data: Buffer) -> None:
        self.objects[key] = bytes(data)

    async def create(self, key: str, data: Buffer) -> None:
        if self.objects.setdefault(key, bytes(data)) != bytes(data):
            raise ConflictError(f"memory:{key} exists with other content")

    async def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise NotFoundError(f"memory:{key} does not exist") from None

    async def size(self, key: str) -> int | None:
        data = self.objects.get(key)
        return None if data is None else len(data)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            yield key

    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    async def ping(self) -> None:
        return

    async def ensure_bucket(self) -> None:
        return

    async def close(self) -> None:
        return
