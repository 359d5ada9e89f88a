"""A second S3 server for the blob contract: versitygw, built once where Go is present."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.local import paths, ports

VERSION = "1.8.0"
"""The first whose conditional create is atomic; 1.7.0 lets two rivals win now and then."""
_MODULE = f"github.com/versity/versitygw/cmd/versitygw@v{VERSION}"
_BUILD_S = 540
ACCESS_KEY, SECRET_KEY = "tester", "not-a-secret"


def binary() -> Path:
    """Path of the built server; skips the test where it cannot be had."""
    directory = paths.cache() / f"versitygw-{VERSION}"
    if (directory / "versitygw").exists():
        return directory / "versitygw"
    go = shutil.which("go")
    if go is None:
        pytest.skip("versitygw needs Go, which is not installed")
    env = {**os.environ, "GOBIN": str(directory)}
    try:
        subprocess.run([go, "install", _MODULE], env=env, check=True, capture_output=True, timeout=_BUILD_S)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"versitygw {VERSION} cannot be built: {error.stderr.decode()[-300:]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"versitygw {VERSION} took longer than {_BUILD_S} s to build")
    return directory / "versitygw"


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Serves a directory; yields the URL."""
    (port,) = ports.free(1)
    data = paths.make_dir(directory / "data")
    env = {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    with (directory / "log").open("wb") as log:
        command = [str(binary()), "--quiet", "--port", f"127.0.0.1:{port}", "posix", str(data)]
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not ports.is_open(port):
            assert server.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, "versitygw did not answer within 30 s"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)
