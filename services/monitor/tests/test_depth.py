"""What waits on each topic."""

from slipstream_monitor.depth import depths, reader_group

from slipstream import topics
from slipstream.bus import TopicPartition

PROMPTS = topics.PROMPTS.full_name("ns")


def test_messages_and_backlog_add_up_over_partitions() -> None:
    offsets = {TopicPartition(PROMPTS, 0): (5, 20), TopicPartition(PROMPTS, 1): (0, 10)}
    [prompts, *rest] = depths("ns", offsets, {PROMPTS: {TopicPartition(PROMPTS, 0): 12}})
    assert (prompts.topic, prompts.messages, prompts.behind) == (PROMPTS, 30, 18)
    assert [t.topic for t in rest] == [t.full_name("ns") for t in topics.ALL if t is not topics.PROMPTS]
    assert all((t.messages, t.behind) == (0, -1) for t in rest)


def test_backlog_is_unknown_without_commits_and_never_negative() -> None:
    offsets = {TopicPartition(PROMPTS, 0): (5, 20)}
    assert depths("ns", offsets, {PROMPTS: {}})[0].behind == -1
    assert depths("ns", offsets, {PROMPTS: {TopicPartition(PROMPTS, 0): 25}})[0].behind == 0
    assert depths("ns", offsets, {PROMPTS: {TopicPartition(PROMPTS, 0): 1}})[0].behind == 15


def test_groups_are_those_of_the_services() -> None:
    assert [reader_group(t, "ns") for t in (topics.PROMPTS, topics.ROLLOUTS, topics.SAMPLES)] == [
        "ns.rollout",
        "ns.reward",
        "",
    ]
