"""Every error that Slipstream raises on purpose, in one tree.

SlipstreamError
├── ConfigError          a setting or argument is wrong        -> exit at start, code 2
├── RetryableError       a dependency is away or busy          -> back off, try again, commit nothing
│   └── StoreFullError   the object store has no room          -> same, and say so
├── PoisonMessageError   this message can never be handled     -> dead-letter it, go on
├── IntegrityError       bytes differ from their digest        -> fetch again, then go to an anchor
│   └── WrongBaseError   a delta meets weights it is not for   -> go to an anchor
├── NotFoundError        an object that must exist does not    -> plan again, then go to an anchor
├── ConflictError        someone else created it first         -> stop this attempt
│   └── FencedError      a newer owner has taken over          -> exit, code 3
└── RewardError          a user's reward function failed       -> record ERROR for the completion
"""


class SlipstreamError(Exception):
    """Base of all. The message says what happened, where, and what to do."""


class ConfigError(SlipstreamError, ValueError):
    """A setting, argument or input file is wrong. Retrying cannot help."""


class RetryableError(SlipstreamError):
    """A dependency is unreachable or busy. The same call may succeed later."""


class StoreFullError(RetryableError):
    """The object store or a disk has no room left."""


class PoisonMessageError(SlipstreamError):
    """A message that no retry can make valid."""


class IntegrityError(SlipstreamError):
    """Bytes do not match the digest or the format that was promised for them."""


class WrongBaseError(IntegrityError):
    """A delta was applied to weights other than those it was made from."""


class NotFoundError(SlipstreamError, LookupError):
    """An object or version that must exist does not."""


class ConflictError(SlipstreamError):
    """A conditional create lost: the object exists already."""


class FencedError(ConflictError):
    """A newer owner has taken over; this process must stop."""


class RewardError(SlipstreamError):
    """A user's reward function raised, hung, crashed or returned something that is not a number."""
