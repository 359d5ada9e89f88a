"""What a recipe imports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slipstream.recipe.types import Completion, Prompt

if TYPE_CHECKING:
    from slipstream.recipe.advantages import group_advantages
    from slipstream.recipe.run import Batch, Group, Run, standard_loop
    from slipstream.recipe.settings import Loss, Reward, Settings

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

# Imported when first used: reward workers import recipes, and need neither gRPC nor Kafka for it.
_HOMES = {
    "Batch": "run",
    "Group": "run",
    "Loss": "settings",
    "Reward": "settings",
    "Run": "run",
    "Settings": "settings",
    "group_advantages": "advantages",
    "standard_loop": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
