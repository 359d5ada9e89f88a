"""The object store: what every implementation promises, and content addressing on top."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Protocol

from typing_extensions import Buffer

from slipstream.errors import IntegrityError
from slipstream.v1.common_pb2 import BlobRef


class BlobStore(Protocol):
    """Objects by key. All methods run their blocking work off the event loop, have time limits, and
    raise RetryableError (naming the store) when it is away, ConfigError for wrong credentials or a
    missing bucket, StoreFullError when it has no room."""

    async def put(self, key: str, data: Buffer) -> None:
        """Creates or replaces an object. Atomic: readers see all of it or none."""
        ...

    async def create(self, key: str, data: Buffer) -> None:
        """Creates an object if no such key exists, atomically against rivals.

        A repeat with equal bytes succeeds, so that a retry after a lost answer is harmless.

        Raises:
            ConflictError: the key exists with other bytes.
        """
        ...

    async def get(self, key: str) -> bytes:
        """Whole object.

        Raises:
            NotFoundError: no such key.
        """
        ...

    async def size(self, key: str) -> int | None:
        """Bytes stored under a key, None when there is no such key."""
        ...

    def list(self, prefix: str) -> AsyncIterator[str]:
        """Keys with a prefix, in lexicographic order."""
        ...

    async def delete(self, key: str) -> None:
        """Deletes an object; a missing key is no error."""
        ...

    async def ping(self) -> None:
        """One cheap round trip, checking credentials and bucket."""
        ...

    async def ensure_bucket(self) -> None:
        """Creates the bucket (directory) where it is missing."""
        ...

    async def close(self) -> None:
        """Frees connections and threads."""
        ...


def blob_key(sha256: str) -> str:
    """Key of the blob with this SHA-256 (hex)."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


async def put_blob(store: BlobStore, data: Buffer, *, sha256: str | None = None) -> BlobRef:
    """Stores immutable bytes under their content hash; skips the upload when they are there.

    Args:
        sha256: hash if the caller has it. Hashing megabytes belongs off the event loop.
    """
    digest = sha256 or hashlib.sha256(data).hexdigest()
    view = memoryview(data)
    ref = BlobRef(key=blob_key(digest), sha256=digest, size_bytes=view.nbytes)
    if await store.size(ref.key) != ref.size_bytes:
        await store.put(ref.key, data)
    return ref


def verify_blob(ref: BlobRef, data: bytes) -> None:
    """Checks bytes against a reference.

    Raises:
        IntegrityError: length or hash differ.
    """
    if len(data) != ref.size_bytes:
        raise IntegrityError(f"blob {ref.key}: {len(data)} bytes stored, {ref.size_bytes} expected")
    found = hashlib.sha256(data).hexdigest()
    if found != ref.sha256:
        raise IntegrityError(f"blob {ref.key}: content hash is {found}")


async def get_blob(store: BlobStore, ref: BlobRef) -> bytes:
    """Fetches and checks a blob (hashing off the event loop).

    Raises:
        NotFoundError: no such blob.
        IntegrityError: the stored bytes are not those promised.
    """
    data = await store.get(ref.key)
    await asyncio.to_thread(verify_blob, ref, data)
    return data
