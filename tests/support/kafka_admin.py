"""What tests do to a Kafka behind the bus's back."""

from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as KafkaTopic
from aiokafka.admin.records_to_delete import RecordsToDelete

from slipstream.bus import TopicPartition


async def delete_records(bootstrap: str, tp: TopicPartition, before: int) -> None:
    """Does at once what retention would do."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.delete_records({KafkaPartition(*tp): RecordsToDelete(before_offset=before)})
    finally:
        await admin.close()


async def create_topic(bootstrap: str, name: str, config: dict[str, str]) -> None:
    """Creates a topic with one partition and special settings."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([KafkaTopic(name, 1, 1, topic_configs=config)])
    finally:
        await admin.close()
