"""What only a directory can get wrong. The common promises are in tests/integration/test_blobs.py."""

import errno
import os
from pathlib import Path

import pytest

from slipstream.blobs.directory import DirectoryStore
from slipstream.errors import ConfigError, StoreFullError


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a//b", "../up", "a/../../up", ".", "a/"])
async def test_a_key_cannot_leave_the_directory(tmp_path: Path, key: str) -> None:
    store = DirectoryStore(tmp_path / "store")
    await store.ensure_bucket()
    with pytest.raises(ConfigError, match="cannot be an object's key"):
        await store.put(key, b"")


async def test_a_full_disk_is_told_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreFullError, match="no room left"):
            await store.put("a/b", b"1")
    assert [key async for key in store.list("")] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_an_unfinished_write_is_not_listed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / ".new-abc").write_bytes(b"half")
    await store.put("whole", b"1")
    assert [key async for key in store.list("")] == ["whole"]


async def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "none")
    with pytest.raises(ConfigError, match="does not exist"):
        await store.ping()
    with pytest.raises(ConfigError, match="does not exist"):
        await store.put("a", b"")
