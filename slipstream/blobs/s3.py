"""Objects in anything that speaks S3, through minio-py; the only file that imports it.

minio-py blocks, so its calls run in a thread pool. Two things that it lacks are added here: limits on time
(its own pool waits five minutes, five times), and `If-None-Match`, which its `put_object` would silently
turn into user metadata. Objects are written by PUT to a URL that minio-py has signed.
"""

import asyncio
import base64
import hashlib
import io
import os
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar
from xml.etree.ElementTree import ParseError

import certifi
import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error
from typing_extensions import Buffer

from slipstream.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    RetryableError,
    SlipstreamError,
    StoreFullError,
)
from slipstream.settings import CommonSettings

SINGLE_PUT_BYTES = 5 * 1024**3
"""S3's limit for an upload in one piece; what is larger goes up in parts."""
PART_BYTES = 64 * 1024 * 1024

_ATTEMPTS = 5
_PAUSE_S = 0.2
_PAGE = 1000
_NOWHERE = "no-such-prefix/"
_LIMIT_S = 600.0
_CONFLICT, _PRECONDITION_FAILED, _NO_ROOM = 409, 412, 507

# XAdminUserNotFound is versitygw's word for an unknown access key; with a HEAD it comes as 404.
_REFUSED = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "InvalidAccessKeyId",
        "InvalidBucketName",
        "SignatureDoesNotMatch",
        "XAdminUserNotFound",
    }
)
_FULL = frozenset({"XMinioStorageFull", "QuotaExceeded", "InsufficientStorage", "EntityTooLargeForStorage"})
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted"})

T = TypeVar("T")


class S3Store:
    """Implements `slipstream.blobs.BlobStore`."""

    def __init__(
        self,
        settings: CommonSettings,
        *,
        threads: int = 8,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            threads: calls that run at once; further ones wait.
            read_timeout_s: longest silence of the server within a request.

        Raises:
            ConfigError: the URL is malformed.
        """
        url = urllib.parse.urlsplit(settings.store_url)
        if not url.hostname or url.path not in ("", "/") or url.query:
            raise ConfigError(f"SLIPSTREAM_STORE_URL={settings.store_url}: expected http(s)://host:port")
        self._url, self._bucket = settings.store_url.rstrip("/"), settings.store_bucket
        # Part uploads run in threads of minio-py's own: three for each of ours.
        self._http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=connect_timeout_s, read=read_timeout_s),
            maxsize=threads * 4,
            blocksize=1024 * 1024,
            retries=urllib3.Retry(
                total=2,
                backoff_factor=0.2,
                status_forcelist=[429, 500, 502, 503, 504],
                raise_on_status=False,
                respect_retry_after_header=False,
            ),
            cert_reqs="CERT_REQUIRED",
            ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
        )
        self._client = Minio(
            url.netloc,
            access_key=settings.store_access_key.get_secret_value() or None,
            secret_key=settings.store_secret_key.get_secret_value() or None,
            secure=url.scheme == "https",
            region=settings.store_region,
            http_client=self._http,
        )
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="s3")

    async def put(self, key: str, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        await self._run(key, lambda: self._put(key, view))

    def _put(self, key: str, view: memoryview) -> None:
        if view.nbytes > SINGLE_PUT_BYTES:
            body = io.BufferedReader(_Body(view))
            self._client.put_object(self._bucket, key, body, view.nbytes, part_size=PART_BYTES)
            return
        answer = self._send(key, view, {})
        if answer.status // 100 != 2:
            raise _error_in(answer)

    def _send(self, key: str, view: memoryview, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        """PUT to a signed URL. Any header may go with it, and the server takes the content as a stream,
        where a part signed by minio-py without TLS would be held in the server's memory and hashed first."""
        url = self._client.presigned_put_object(self._bucket, key, expires=timedelta(minutes=15))
        headers = {**headers, "Content-Length": str(view.nbytes)}
        return self._http.request("PUT", url, body=_Body(view), headers=headers)

    async def create(self, key: str, data: Buffer) -> None:
        await self._run(key, lambda: self._create(key, memoryview(data).cast("B")))

    def _create(self, key: str, data: memoryview) -> None:
        """A PUT that the server refuses when the key exists.

        412 can be about our own earlier attempt whose answer was lost, so what is there is compared; 409
        means that a rival is writing at this moment.
        """
        checksum = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        for attempt in range(_ATTEMPTS):
            answer = self._send(key, data, {"If-None-Match": "*", "Content-MD5": checksum})
            if answer.status == _PRECONDITION_FAILED:
                if self._get(key) == data:
                    return
                raise ConflictError(f"{self._place(key)} exists with other content")
            if answer.status // 100 == 2:
                return
            if answer.status != _CONFLICT:
                break
            time.sleep(_PAUSE_S * 2**attempt)
        raise _error_in(answer)

    async def get(self, key: str) -> bytes:
        return await self._run(key, lambda: self._get(key))

    def _get(self, key: str) -> bytes:
        response = self._client.get_object(self._bucket, key)
        try:
            return bytes(response.data)
        finally:
            response.close()
            response.release_conn()

    async def size(self, key: str) -> int | None:
        try:
            return await self._run(key, lambda: self._client.stat_object(self._bucket, key).size)
        except NotFoundError:
            # A HEAD has no body: a missing bucket and unknown credentials can look like a missing key.
            await self.ping()
            return None

    async def list(self, prefix: str) -> AsyncIterator[str]:
        entries: Iterator[Any] = self._client.list_objects(self._bucket, prefix, recursive=True)
        while True:
            page = await self._run(prefix, lambda: [e.object_name for e in islice(entries, _PAGE)])
            for key in page:
                yield key
            if len(page) < _PAGE:
                return

    async def delete(self, key: str) -> None:
        await self._run(key, lambda: self._client.remove_object(self._bucket, key))

    async def ping(self) -> None:
        await self._run("", self._look)

    def _look(self) -> None:
        # Not a HEAD: its answer has no body, and so no reason.
        next(self._client.list_objects(self._bucket, _NOWHERE), None)

    async def ensure_bucket(self) -> None:
        await self._run("", self._ensure_bucket)

    def _ensure_bucket(self) -> None:
        try:
            self._look()
        except S3Error as error:
            if error.code != "NoSuchBucket":
                raise
            self._make_bucket()

    def _make_bucket(self) -> None:
        try:
            self._client.make_bucket(self._bucket)
        except S3Error as error:
            if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    async def _run(self, key: str, call: Callable[[], T]) -> T:
        """Runs a blocking call in the pool and translates its errors."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._error_of(error, key) from None

    def _place(self, key: str) -> str:
        return f"{self._url}/{self._bucket}/{key}"

    def _no_bucket(self) -> ConfigError:
        return ConfigError(
            f"{self._url} has no bucket {self._bucket}; create it, or see SLIPSTREAM_STORE_BUCKET"
        )

    def _error_of(self, error: Exception, key: str) -> SlipstreamError:
        if not isinstance(error, S3Error):
            return self._error_without_answer(error)
        if error.code == "NoSuchKey":
            return NotFoundError(f"{self._place(key)} does not exist")
        if error.code == "NoSuchBucket":
            return self._no_bucket()
        if error.code in _REFUSED:
            return ConfigError(
                f"the object store at {self._url} refuses us ({error.code}: {error.message}); check "
                f"SLIPSTREAM_STORE_ACCESS_KEY and SLIPSTREAM_STORE_SECRET_KEY"
            )
        text = f"{self._place(key)}: {error.code}: {error.message}"
        status = getattr(error.response, "status", 0)
        if error.code in _FULL or status == _NO_ROOM or "o space left" in text:
            return StoreFullError(f"the object store has no room left: {text}")
        if error.code in _BUSY or status >= 500 or status in (408, 409, 429):
            return RetryableError(text)
        return SlipstreamError(text)

    def _error_without_answer(self, error: Exception) -> SlipstreamError:
        """No answer, or one that is not S3's."""
        cause = getattr(error, "reason", None) or error
        if isinstance(cause, urllib3.exceptions.SSLError):
            return ConfigError(f"no trusted connection to the object store at {self._url}: {cause}")
        if isinstance(error, InvalidResponseError) and " code: 4" in str(error):
            return ConfigError(f"the server at {self._url} does not speak S3 ({str(error)[:200]})")
        text = str(cause)[:300] or type(cause).__name__
        return RetryableError(f"the object store at {self._url} does not answer: {text}")


class _Body(io.RawIOBase):
    """Memory as a file. In pieces, because a socket's time limit is for one call: `sendall` of a whole body
    would have to be done within the limit for connecting."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), len(self._view) - self._at)
        buffer[:size] = self._view[self._at : self._at + size]
        self._at += size
        return size


def _error_in(answer: urllib3.BaseHTTPResponse) -> Exception:
    try:
        return S3Error.fromxml(answer)
    except (ParseError, UnicodeDecodeError):
        kind = answer.headers.get("content-type")
        return InvalidResponseError(answer.status, kind, answer.data[:200].decode(errors="replace"))
