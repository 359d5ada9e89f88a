"""Who holds the trainer. One loop at a time, for as long as its stream lives."""

import time
import uuid
from dataclasses import dataclass, field

from slipstream.errors import ConflictError, RetryableError


@dataclass(frozen=True)
class Holder:
    """One holder."""

    run_id: str
    client: str
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: float = field(default_factory=time.time)


class Lease:
    """At most one holder."""

    def __init__(self) -> None:
        self.holder: Holder | None = None

    def acquire(self, run_id: str, client: str) -> Holder:
        """Takes the trainer.

        Raises:
            ConflictError: another loop holds it; the message names it.
        """
        if self.holder:
            raise ConflictError(
                f"run {self.holder.run_id} is held by {self.holder.client or 'an unnamed client'} since "
                f"{time.strftime('%H:%M:%S', time.localtime(self.holder.since))};"
                " stop that one, or use another trainer"
            )
        self.holder = Holder(run_id, client)
        return self.holder

    def release(self, holder: Holder) -> None:
        """Lets go; without effect for anyone but the holder."""
        if self.holder is holder:
            self.holder = None

    def check(self, session_id: str) -> None:
        """Lets the holder pass.

        Raises:
            RetryableError: the session is not, or no longer, the holder's: open the run again.
        """
        if self.holder is None or self.holder.session_id != session_id:
            raise RetryableError("this session does not hold the run (any more): open the run again")
