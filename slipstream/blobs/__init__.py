"""The object store: protocol and content addressing in `base`; S3, directory and memory beside it."""

from slipstream.blobs.base import BlobStore, blob_key, get_blob, put_blob, verify_blob
from slipstream.settings import CommonSettings

__all__ = ["BlobStore", "blob_key", "get_blob", "open_store", "put_blob", "verify_blob"]


def open_store(settings: CommonSettings) -> BlobStore:
    """The store that `store_url` names.

    Raises:
        ConfigError: the URL has an unknown scheme.
    """
    from pathlib import Path

    from slipstream.errors import ConfigError

    if settings.store_url.startswith(("http://", "https://")):
        from slipstream.blobs.s3 import S3Store

        return S3Store(settings)
    if settings.store_url.startswith("file:///"):
        from slipstream.blobs.directory import DirectoryStore

        return DirectoryStore(Path(settings.store_url.removeprefix("file://")))
    raise ConfigError(
        f"SLIPSTREAM_STORE_URL={settings.store_url}: expected http://host:port, https://host:port or file:///directory"
    )
