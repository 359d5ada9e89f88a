"""Keeps one fault of a recipe from filling the log."""

from slipstream.clock import Clock

_EVERY_S = 10.0
_MAX_KEYS = 1000


class Sparing:
    """Says what is worth a log line: a thing that is new, or that was last said ten seconds ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def due(self, key: str) -> bool:
        """Whether to say it now."""
        now = self._clock.monotonic()
        if now - self._said.get(key, -_EVERY_S) < _EVERY_S:
            return False
        if len(self._said) >= _MAX_KEYS:
            self._said.clear()
        self._said[key] = now
        return True
