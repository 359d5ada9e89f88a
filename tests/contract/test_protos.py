"""The wire contract: generated code is current, and bytes written yesterday can be read today."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from slipstream import topics
from slipstream.v1 import (
    common_pb2,
    monitor_service_pb2,
    reward_pb2,
    reward_service_pb2,
    rollout_pb2,
    rollout_service_pb2,
    train_pb2,
    trainer_service_pb2,
    weight_sync_service_pb2,
    weights_pb2,
)

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden.json"
MODULES = (
    common_pb2,
    rollout_pb2,
    reward_pb2,
    weights_pb2,
    train_pb2,
    rollout_service_pb2,
    reward_service_pb2,
    trainer_service_pb2,
    weight_sync_service_pb2,
    monitor_service_pb2,
)
MESSAGES = [getattr(module, name) for module in MODULES for name in module.DESCRIPTOR.message_types_by_name]


def filled(cls: Any, depth: int = 0) -> Any:
    """A message with a distinct value in every field; of a oneof, the last member."""
    message = cls()
    for field in message.DESCRIPTOR.fields:
        put(message, field, depth)
    return message


def put(message: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = "key" if field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING else 7
        getattr(message, field.name)[key] = scalar(field.message_type.fields_by_name["value"])
    elif field.message_type is not None:
        child = filled(field.message_type._concrete_class, depth + 1)
        if field.is_repeated:
            getattr(message, field.name).append(child)
        else:
            getattr(message, field.name).CopyFrom(child)
    elif field.is_repeated:
        getattr(message, field.name).extend([scalar(field), scalar(field)])
    else:
        setattr(message, field.name, scalar(field))


def scalar(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"text-{field.number}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([field.number, 0, 255])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return field.number + 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return field.enum_type.values[-1].number
    return 100 + field.number


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.DESCRIPTOR.name)
def test_golden_bytes_of_every_message_still_parse(cls: Any) -> None:
    golden = json.loads(GOLDEN.read_text())[cls.DESCRIPTOR.name]
    data = bytes.fromhex(golden["bytes"])
    message = cls.FromString(data)
    assert json_format.MessageToDict(message) == golden["message"]
    assert message.SerializeToString(deterministic=True) == data


def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    subprocess.run([ROOT / "scripts/protos", tmp_path], check=True, env=environment)
    fresh = {p.name: p.read_text() for p in (tmp_path / "slipstream/v1").iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / "slipstream/v1").glob("*_pb2*")}
    assert fresh == committed


def test_topic_names_partitions_and_retention_are_as_promised() -> None:
    seen = {t.full_name("ns"): (t.message.DESCRIPTOR.name, t.partitions) for t in topics.ALL}
    assert seen == {
        "ns.prompts.v1": ("PromptGroup", 4),
        "ns.rollouts.v1": ("RolloutGroup", 4),
        "ns.samples.v1": ("ScoredGroup", 4),
        "ns.versions.v1": ("VersionAnnounced", 1),
        "ns.replicas.v1": ("ReplicaStatus", 1),
        "ns.steps.v1": ("StepRecord", 1),
        "ns.alignment.v1": ("AlignmentRecord", 1),
        "ns.alerts.v1": ("Alert", 1),
    }


def test_siblings_share_a_key_at_every_stage() -> None:
    prompt = rollout_pb2.PromptGroup(group_id="r/7")
    rollout = rollout_pb2.RolloutGroup(prompt=prompt)
    scored = reward_pb2.ScoredGroup(rollout=rollout)
    keys = {topics.PROMPTS.key(prompt), topics.ROLLOUTS.key(rollout), topics.SAMPLES.key(scored)}
    assert keys == {"r/7"}


def write_golden() -> None:
    """Adds messages that have no golden bytes yet: `python -m tests.contract.test_protos`."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for cls in MESSAGES:
        message = filled(cls)
        data = message.SerializeToString(deterministic=True).hex()
        golden.setdefault(cls.DESCRIPTOR.name, {"bytes": data, "message": json_format.MessageToDict(message)})
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_golden()
