"""`python -m slipstream_reward`."""

from slipstream.service import main
from slipstream_reward.service import RewardScorer
from slipstream_reward.settings import RewardSettings

main("reward", RewardSettings, RewardScorer)
