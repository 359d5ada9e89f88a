"""Where reading may begin, and what may be written. Pure."""

from collections.abc import Mapping

from slipstream.bus.base import MAX_RECORD_BYTES, TopicPartition
from slipstream.errors import ConfigError, IntegrityError


def beginnings(
    spans: Mapping[TopicPartition, tuple[int, int]], offsets: Mapping[TopicPartition, int] | str
) -> dict[TopicPartition, int]:
    """First offset to read per partition.

    Args:
        spans: (first, one past the last) of every partition.
        offsets: as for `Bus.assign`.

    Raises:
        ConfigError: `offsets` is a word that is not known.
        IntegrityError: records from a given offset on are gone.
    """
    if isinstance(offsets, str):
        if offsets not in ("earliest", "latest"):
            raise ConfigError(f"offsets is {offsets!r}; expected a mapping, 'earliest' or 'latest'")
        return {tp: span[offsets == "latest"] for tp, span in spans.items()}
    begin = {tp: offsets.get(tp, first) for tp, (first, _) in spans.items()}
    for tp, offset in begin.items():
        check_span(tp, offset, spans[tp])
    return begin


def check_span(tp: TopicPartition, offset: int, span: tuple[int, int]) -> None:
    """Checks that reading can go on at an offset.

    Raises:
        IntegrityError: records from there on were deleted, or the log is shorter than it was.
    """
    first, end = span
    if offset < first:
        raise IntegrityError(
            f"{tp.topic}, partition {tp.partition}: records {offset} to {first - 1} are gone (retention); "
            f"the log begins at {first}"
        )
    if offset > end:
        raise IntegrityError(
            f"{tp.topic}, partition {tp.partition}: offset {offset} is past the end, {end}; was it deleted?"
        )


def too_large(topic: str, size: int, why: object = f"the limit is {MAX_RECORD_BYTES}") -> ConfigError:
    """Error for a record that no broker will take."""
    return ConfigError(f"{topic}: the broker cannot take a record of {size} bytes: {why}")
