"""`python -m slipstream_rollout`"""

from slipstream.service import main
from slipstream_rollout.service import RolloutService
from slipstream_rollout.settings import RolloutSettings

if __name__ == "__main__":  # the engine's worker processes import this module again
    main("rollout", RolloutSettings, RolloutService)
