"""Keys go to the partition that Kafka's own clients choose."""

from aiokafka.partitioner import DefaultPartitioner
from aiokafka.partitioner import murmur2 as kafka_murmur2
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bus.partition import murmur2, partition_of


@given(st.binary(max_size=70))
def test_the_hash_is_kafkas(data: bytes) -> None:
    assert murmur2(data) == kafka_murmur2(data) & 0xFFFFFFFF


@given(st.binary(max_size=40), st.integers(1, 64))
def test_the_partition_is_kafkas(key: bytes, count: int) -> None:
    assert partition_of(key, count) == DefaultPartitioner()(key, list(range(count)), list(range(count)))
