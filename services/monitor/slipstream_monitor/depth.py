"""How much waits on each topic. Pure."""

from collections.abc import Mapping

from slipstream import topics
from slipstream.bus import TopicPartition
from slipstream.v1.monitor_service_pb2 import TopicStatus

Offsets = Mapping[TopicPartition, tuple[int, int]]


def reader_group(topic: topics.Topic, namespace: str) -> str:
    """Consumer group whose backlog on a topic is of interest; empty where nobody commits to the broker."""
    readers = {topics.PROMPTS.name: "rollout", topics.ROLLOUTS.name: "reward"}
    return f"{namespace}.{readers[topic.name]}" if topic.name in readers else ""


def depths(
    namespace: str, offsets: Offsets, committed: Mapping[str, Mapping[TopicPartition, int]]
) -> list[TopicStatus]:
    """One entry per topic, in the order of the pipeline.

    Args:
        offsets: (first, one past the last) per partition.
        committed: next offset to read per partition, by topic name; without an entry, `behind` is -1.
    """
    return [
        TopicStatus(
            topic=name,
            messages=sum(end for tp, (_, end) in offsets.items() if tp.topic == name),
            behind=_behind(name, offsets, committed.get(name, {})),
        )
        for name in (topic.full_name(namespace) for topic in topics.ALL)
    ]


def _behind(topic: str, offsets: Offsets, committed: Mapping[TopicPartition, int]) -> int:
    if not committed:
        return -1
    partitions = {tp: span for tp, span in offsets.items() if tp.topic == topic}
    # Where nothing is committed yet a group begins at the first record that is still there.
    return sum(max(0, end - max(first, committed.get(tp, first))) for tp, (first, end) in partitions.items())
