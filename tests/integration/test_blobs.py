"""What every object store promises, in memory, in a directory, and on two S3 servers."""

import asyncio
import os
import resource
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from typing_extensions import Buffer

from slipstream.blobs import BlobStore, get_blob, put_blob
from slipstream.blobs.directory import DirectoryStore
from slipstream.blobs.memory import MemoryStore
from slipstream.blobs.s3 import S3Store
from slipstream.errors import (
    ConfigError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    RetryableError,
    SlipstreamError,
    StoreFullError,
)
from slipstream.local import ports
from slipstream.settings import CommonSettings
from tests.support import versitygw
from tests.support.fixtures import Servers

S3 = [
    pytest.param("s3proxy", marks=pytest.mark.integration),
    pytest.param("versitygw", marks=[pytest.mark.integration, pytest.mark.timeout(600)]),
]


@pytest.fixture(scope="session")
def versitygw_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with versitygw.running(tmp_path_factory.mktemp("versitygw")) as url:
        yield url


def s3_settings(kind: str, request: pytest.FixtureRequest) -> CommonSettings:
    """Settings for a bucket that does not exist yet."""
    bucket = f"t{uuid.uuid4().hex[:12]}"
    if kind == "versitygw":
        url, access, secret = (
            request.getfixturevalue("versitygw_url"),
            versitygw.ACCESS_KEY,
            versitygw.SECRET_KEY,
        )
    else:
        server = request.getfixturevalue("servers").s3
        url, access, secret = server.url, server.credentials.access_key, server.credentials.secret_key
    return CommonSettings(
        store_url=url,
        store_bucket=bucket,
        store_access_key=SecretStr(access),
        store_secret_key=SecretStr(secret),
    )


@pytest.fixture(params=["memory", "directory", *S3])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BlobStore]:
    if request.param == "memory":
        memory = MemoryStore()
        return lambda: memory
    if request.param == "directory":
        return lambda: DirectoryStore(tmp_path / "store")
    settings = s3_settings(request.param, request)
    return lambda: S3Store(settings)


@pytest.fixture
async def connect(make_store: Callable[[], BlobStore]) -> AsyncIterator[Callable[[], BlobStore]]:
    """Makes clients of one store."""
    made: list[BlobStore] = []

    def keep() -> BlobStore:
        made.append(make_store())
        return made[-1]

    await keep().ensure_bucket()
    yield keep
    for store in made:
        await store.close()


@pytest.fixture
def store(connect: Callable[[], BlobStore]) -> BlobStore:
    return connect()


@pytest.fixture(params=S3)
def settings(request: pytest.FixtureRequest) -> CommonSettings:
    return s3_settings(request.param, request)


async def keys(store: BlobStore, prefix: str) -> list[str]:
    return [key async for key in store.list(prefix)]


@pytest.mark.parametrize("data", [b"", b"\x00", b"text", bytes(range(256)) * 5000], ids=len)
async def test_what_is_put_is_got(store: BlobStore, data: bytes) -> None:
    await store.put("a/b c/+&=%ä.bin", data)
    assert await store.get("a/b c/+&=%ä.bin") == data
    assert await store.size("a/b c/+&=%ä.bin") == len(data)


async def test_any_buffer_can_be_put(store: BlobStore) -> None:
    buffers: list[Buffer] = [bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"abcd").cast("H")]
    for number, data in enumerate(buffers):
        await store.put(f"{number}", data)
        await store.create(f"created-{number}", data)
        assert await store.get(f"{number}") == await store.get(f"created-{number}") == b"abcd"


async def test_put_replaces(store: BlobStore) -> None:
    await store.put("key", b"first, and longer")
    await store.put("key", b"second")
    assert await store.get("key") == b"second"


@pytest.mark.timeout(300)
async def test_a_large_object_comes_back_whole(store: BlobStore) -> None:
    data = os.urandom(150 * 1024 * 1024 + 7)
    ref = await put_blob(store, data)
    assert await get_blob(store, ref) == data


@pytest.mark.integration
async def test_a_server_that_cannot_write_to_its_disk_is_named_keeps_nothing_half_and_recovers(
    common_settings: CommonSettings, servers: Servers
) -> None:
    store, pid = S3Store(common_settings), servers.s3.child.pid
    data = os.urandom(4 * 1024 * 1024)
    # To the server, a limit on the size of its files is a disk that is full.
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024 * 1024, resource.RLIM_INFINITY))
    try:
        with pytest.raises((RetryableError, StoreFullError), match=common_settings.store_url):
            await store.put("key", data)
        with pytest.raises((RetryableError, StoreFullError), match=common_settings.store_url):
            await store.create("created", data)
        assert [await store.size(key) for key in ("key", "created")] == [None, None]
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    await store.put("key", data)
    await store.create("created", data)
    assert await store.get("key") == await store.get("created") == data
    await store.close()


async def test_a_missing_object_is_named(store: BlobStore) -> None:
    with pytest.raises(NotFoundError, match="no/such does not exist"):
        await store.get("no/such")
    assert await store.size("no/such") is None
    await store.delete("no/such")


async def test_a_deleted_object_is_gone(store: BlobStore) -> None:
    await store.put("a/b", b"1")
    await store.put("a/c", b"2")
    await store.delete("a/b")
    assert await store.size("a/b") is None
    assert await keys(store, "") == ["a/c"]


async def test_listing_is_by_prefix_and_in_order(store: BlobStore) -> None:
    wanted = ["runs/a/10", "runs/a/2", "runs/a/x/y", "runs/ab/1"]
    for key in (*reversed(wanted), "run", "rune"):
        await store.put(key, b"")
    assert await keys(store, "runs/a") == wanted
    assert await keys(store, "runs/a/") == wanted[:3]
    assert await keys(store, "runs/a/1") == ["runs/a/10"]
    assert await keys(store, "none/") == []
    assert await keys(store, "") == ["run", "rune", *wanted]


@pytest.mark.timeout(180)
async def test_listing_goes_past_one_page(store: BlobStore) -> None:
    wanted = [f"many/{number:05}" for number in range(1100)]
    for start in range(0, len(wanted), 100):
        await asyncio.gather(*(store.put(key, b"") for key in wanted[start : start + 100]))
    assert await keys(store, "many/") == wanted


async def test_create_refuses_a_key_that_exists_with_other_content(store: BlobStore) -> None:
    await store.create("m/1", b"mine")
    with pytest.raises(ConflictError, match="m/1 exists with other content"):
        await store.create("m/1", b"theirs")
    assert await store.get("m/1") == b"mine"


async def test_create_can_be_repeated_with_the_same_content(store: BlobStore) -> None:
    for _ in range(3):
        await store.create("m/1", b"mine")
    assert await store.get("m/1") == b"mine"


async def test_a_deleted_key_can_be_created_again(store: BlobStore) -> None:
    await store.create("m/1", b"first")
    await store.delete("m/1")
    await store.create("m/1", b"second")
    assert await store.get("m/1") == b"second"


async def test_of_rivals_who_create_one_key_exactly_one_wins(
    connect: Callable[[], BlobStore],
) -> None:
    rivals = [connect() for _ in range(4)]
    for attempt in range(10):
        key = f"race/{attempt}"
        outcomes = await asyncio.gather(
            *(rivals[n % 4].create(key, f"rival {n}".encode() * 500) for n in range(12)),
            return_exceptions=True,
        )
        winners = [n for n, outcome in enumerate(outcomes) if outcome is None]
        losers = [outcome for outcome in outcomes if outcome is not None]
        assert len(winners) == 1
        assert all(isinstance(outcome, ConflictError) for outcome in losers)
        assert await rivals[0].get(key) == f"rival {winners[0]}".encode() * 500


async def test_rivals_with_equal_content_all_succeed(store: BlobStore) -> None:
    await asyncio.gather(*(store.create("same", b"equal") for _ in range(8)))
    assert await store.get("same") == b"equal"


async def test_readers_never_see_half_of_an_object(connect: Callable[[], BlobStore]) -> None:
    writer, reader = connect(), connect()
    versions = [bytes([n]) * 400_000 for n in range(2)]
    await writer.put("key", versions[0])
    writing = asyncio.create_task(alternate(writer, versions))
    for _ in range(30):
        data = await reader.get("key")
        assert len(data) == 400_000
        assert data in versions
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def alternate(store: BlobStore, versions: list[bytes]) -> None:
    while True:
        for data in versions:
            await store.put("key", data)


async def test_a_blob_whose_bytes_were_changed_is_noticed(store: BlobStore) -> None:
    ref = await put_blob(store, b"weights")
    await store.put(ref.key, b"weightz")
    with pytest.raises(IntegrityError, match="content hash"):
        await get_blob(store, ref)
    await store.put(ref.key, b"foreign bytes")
    with pytest.raises(IntegrityError, match="13 bytes stored, 7 expected"):
        await get_blob(store, ref)
    # Putting the right bytes mends it.
    assert await put_blob(store, b"weights") == ref
    assert await get_blob(store, ref) == b"weights"


async def test_a_ready_store_answers_a_ping(store: BlobStore) -> None:
    await store.ping()
    await store.ensure_bucket()
    await store.ping()


async def test_a_missing_bucket_is_a_configuration_error(settings: CommonSettings) -> None:
    store = S3Store(settings)
    for call in (
        store.ping(),
        store.size("a"),
        store.put("a", b""),
        store.get("a"),
        store.create("a", b""),
        keys(store, ""),
    ):
        with pytest.raises(ConfigError, match=f"has no bucket {settings.store_bucket}"):
            await call
    await store.close()


@pytest.mark.parametrize("wrong", ["store_access_key", "store_secret_key"])
async def test_wrong_credentials_are_a_configuration_error(settings: CommonSettings, wrong: str) -> None:
    owner = S3Store(settings)
    await owner.ensure_bucket()
    await owner.put("a", b"1")
    intruder = S3Store(settings.model_copy(update={wrong: SecretStr("wrong")}))
    for call in (
        intruder.ping(),
        intruder.get("a"),
        intruder.put("a", b"2"),
        intruder.create("b", b"2"),
        intruder.delete("a"),
        intruder.size("a"),
        keys(intruder, ""),
    ):
        with pytest.raises(ConfigError, match=r"refuses us.*SLIPSTREAM_STORE_ACCESS_KEY"):
            await call
    assert await owner.get("a") == b"1"
    assert await owner.size("b") is None
    await owner.close()
    await intruder.close()


async def test_a_store_that_is_away_is_named() -> None:
    (port,) = ports.free(1)
    store = S3Store(CommonSettings(store_url=f"http://127.0.0.1:{port}"))
    for call in (store.ping(), store.put("a", b""), store.get("a"), store.create("a", b""), keys(store, "")):
        with pytest.raises(RetryableError, match=f"http://127.0.0.1:{port} does not answer"):
            await call
    await store.close()


async def answering(status: str, body: bytes) -> asyncio.Server:
    """A server that gives one answer to everything."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [
            line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        await reader.readexactly(int(length[0]) if length else 0)
        kind = "application/xml" if body.startswith(b"<") else "text/plain"
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"Connection: close\r\n\r\n".encode()
        )
        writer.write(body)
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def xml_error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>because</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        ("507 Insufficient Storage", xml_error("XMinioStorageFull"), "StoreFullError", "no room left"),
        ("503 Service Unavailable", xml_error("SlowDown"), "RetryableError", "SlowDown"),
        (
            "500 Internal Server Error",
            xml_error("InternalError"),
            "RetryableError",
            "No space left|InternalError",
        ),
        ("404 Not Found", b"nothing here", "ConfigError", "does not speak S3"),
        ("502 Bad Gateway", b"proxy", "RetryableError", "502"),
    ],
)
async def test_what_a_server_says_decides_what_is_done(
    status: str, body: bytes, kind: str, text: str
) -> None:
    server = await answering(status, body)
    address = server.sockets[0].getsockname()
    store = S3Store(CommonSettings(store_url=f"http://{address[0]}:{address[1]}"))
    for call in (store.put("a", b"data"), store.create("a", b"data")):
        with pytest.raises(SlipstreamError, match=text) as caught:
            await call
        assert type(caught.value).__name__ == kind
    await store.close()
    server.close()


async def test_a_server_that_never_answers_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    store = S3Store(CommonSettings(store_url=f"http://{address[0]}:{address[1]}"), read_timeout_s=0.3)
    async with asyncio.timeout(20):
        with pytest.raises(RetryableError, match="does not answer"):
            await store.get("a")
    await store.close()
    server.close()


@pytest.mark.parametrize("url", ["http://", "http://host:9000/path", "http://host:9000?x=1"])
def test_a_malformed_address_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="SLIPSTREAM_STORE_URL"):
        S3Store(CommonSettings(store_url=url))
