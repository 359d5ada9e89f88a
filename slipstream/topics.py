"""The topics: names, message types, keys' meaning, partitions and retention."""

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message as ProtoMessage

from slipstream.v1.reward_pb2 import ScoredGroup
from slipstream.v1.rollout_pb2 import PromptGroup, RolloutGroup
from slipstream.v1.train_pb2 import Alert, AlignmentRecord, StepRecord
from slipstream.v1.weights_pb2 import ReplicaStatus, VersionAnnounced

_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class Topic:
    """One topic. The full name is `<namespace>.<name>.v1`."""

    name: str
    message: type[ProtoMessage]
    key: Callable[..., str]
    """Message -> record key; records with equal keys stay in order."""
    partitions: int
    retention_ms: int

    def full_name(self, namespace: str) -> str:
        return f"{namespace}.{self.name}.v1"


PROMPTS = Topic("prompts", PromptGroup, lambda m: m.group_id, 4, 7 * _DAY_MS)
ROLLOUTS = Topic("rollouts", RolloutGroup, lambda m: m.prompt.group_id, 4, 7 * _DAY_MS)
SAMPLES = Topic("samples", ScoredGroup, lambda m: m.rollout.prompt.group_id, 4, 7 * _DAY_MS)
VERSIONS = Topic("versions", VersionAnnounced, lambda m: m.run_id, 1, 30 * _DAY_MS)
REPLICAS = Topic("replicas", ReplicaStatus, lambda m: m.replica_id, 1, 1 * _DAY_MS)
STEPS = Topic("steps", StepRecord, lambda m: m.run_id, 1, 90 * _DAY_MS)
ALIGNMENT = Topic("alignment", AlignmentRecord, lambda m: m.run_id, 1, 30 * _DAY_MS)
ALERTS = Topic("alerts", Alert, lambda m: m.run_id, 1, 90 * _DAY_MS)

ALL = (PROMPTS, ROLLOUTS, SAMPLES, VERSIONS, REPLICAS, STEPS, ALIGNMENT, ALERTS)

DEAD_LETTER_RETENTION_MS = 90 * _DAY_MS


def dead_letter_name(namespace: str, group: str) -> str:
    """Topic for messages that the consumer group `group` could not handle."""
    return f"{namespace}.{group}.dead.v1"
