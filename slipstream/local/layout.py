"""Which process of a local stack listens where and with which settings. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.settings import PREFIX

HOST = "127.0.0.1"
DEFAULT_PORT_BASE = 17100
DEFAULT_BUCKET = "slipstream"
# Variables that `up` itself decides: where each process listens and what it is called.
_PLACED = ("_PORT", "_HOST", "_TARGET", "_REPLICA_ID", "_WORK_DIR")


@dataclass(frozen=True)
class Ports:
    """Ports of a stack: eight in a row from `base`, then one for each further rollout replica."""

    base: int = DEFAULT_PORT_BASE
    replicas: int = 1

    @property
    def kafka(self) -> int:
        return self.base

    @property
    def controller(self) -> int:
        return self.base + 1

    @property
    def s3(self) -> int:
        return self.base + 2

    @property
    def page(self) -> int:
        return self.base + 3

    def service(self, process: str) -> int:
        """gRPC port of a process: `trainer`, `rollout-0`, ..."""
        fixed = ("reward", "trainer", "weightsync", "monitor")
        if process in fixed:
            return self.base + 4 + fixed.index(process)
        return self.base + 8 + int(process.removeprefix("rollout-"))

    def processes(self) -> list[str]:
        """Names of the service processes, in the order of their start."""
        return ["weightsync", "monitor", "reward", "trainer", *(f"rollout-{n}" for n in range(self.replicas))]

    def named(self) -> dict[str, int]:
        """Every port with what it is for."""
        fixed = {
            "kafka": self.kafka,
            "kafka controller": self.controller,
            "s3": self.s3,
            "web page": self.page,
        }
        return fixed | {name: self.service(name) for name in self.processes()}


def module_of(process: str) -> str:
    """Python module that a process runs."""
    return f"slipstream_{service_of(process)}"


def service_of(process: str) -> str:
    return process.split("-")[0]


def client_variables(
    ports: Ports, access_key: str, secret_key: str, user: Mapping[str, str]
) -> dict[str, str]:
    """Environment for recipes and tools. What the user has set is kept."""
    ours = {
        "SLIPSTREAM_KAFKA_BOOTSTRAP": f"{HOST}:{ports.kafka}",
        "SLIPSTREAM_STORE_URL": f"http://{HOST}:{ports.s3}",
        "SLIPSTREAM_STORE_BUCKET": DEFAULT_BUCKET,
        "SLIPSTREAM_STORE_ACCESS_KEY": access_key,
        "SLIPSTREAM_STORE_SECRET_KEY": secret_key,
        "SLIPSTREAM_ROLLOUT_TARGET": f"{HOST}:{ports.service('rollout-0')}",
        "SLIPSTREAM_TRAINER_TARGET": f"{HOST}:{ports.service('trainer')}",
        "SLIPSTREAM_WEIGHTSYNC_TARGET": f"{HOST}:{ports.service('weightsync')}",
        "SLIPSTREAM_MONITOR_TARGET": f"{HOST}:{ports.service('monitor')}",
    }
    own = {k: v for k, v in user.items() if k.startswith(PREFIX) and not k.endswith(_PLACED)}
    return ours | own


def process_variables(
    process: str,
    ports: Ports,
    client: Mapping[str, str],
    *,
    model: Path,
    engine: str,
    device: str,
    home: Path,
    work: Path,
) -> dict[str, str]:
    """Environment of one service process, from the client's."""
    service = service_of(process)
    mine = f"{PREFIX}{service.upper()}_"
    placed = {f"{mine}HOST": HOST, f"{mine}PORT": str(ports.service(process))}
    defaults: dict[str, str] = {}
    if service == "rollout":
        placed |= {f"{mine}REPLICA_ID": process, f"{mine}WORK_DIR": str(work / process)}
        # Services share the cores: binding and spinning threads would starve one another.
        defaults = {f"{mine}MODEL": str(model), f"{mine}ENGINE": engine, f"{mine}THREADS": "nobind"}
    elif service == "trainer":
        defaults = {
            f"{mine}MODEL": str(model),
            f"{mine}CHECKPOINT_DIR": str(home / "checkpoints"),
            f"{mine}DEVICE": device,
        }
    elif service == "reward":
        # A stable name lets Kafka hand its partitions back at once after a crash.
        placed |= {f"{mine}REPLICA_ID": "reward-0"}
    elif service == "monitor":
        placed |= {f"{mine}PAGE_PORT": str(ports.page)}
    return defaults | dict(client) | placed
