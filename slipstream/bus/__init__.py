"""The event log: protocols in `base`, Apache Kafka in `kafka`, one process in `memory`."""

from slipstream.bus.base import Bus, Consumer, NewTopic, Producer, Record, TopicPartition
from slipstream.settings import CommonSettings

__all__ = ["Bus", "Consumer", "NewTopic", "Producer", "Record", "TopicPartition", "open_bus"]


def open_bus(settings: CommonSettings) -> Bus:
    """The bus that the settings name. Call `start` before use."""
    from slipstream.bus.kafka import KafkaBus

    return KafkaBus(settings)
