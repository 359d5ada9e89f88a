"""What a recipe imports."""

from slipstream.recipe.advantages import group_advantages
from slipstream.recipe.run import Batch, Group, Run, standard_loop
from slipstream.recipe.settings import Loss, Reward, Settings
from slipstream.recipe.types import Completion, Prompt

__all__ = [
    "Batch",
    "Completion",
    "Group",
    "Loss",
    "Prompt",
    "Reward",
    "Run",
    "Settings",
    "group_advantages",
    "standard_loop",
]
