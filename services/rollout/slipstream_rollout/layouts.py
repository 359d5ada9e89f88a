"""From the layouts that an engine computes with back to the checkpoint's."""

from typing import Any

import torch


def published(tensor: torch.Tensor) -> torch.Tensor:
    """In bf16, as it was published, when it is computed with in float32 and holds nothing finer."""
    narrow = tensor.cpu().bfloat16()
    exact = torch.equal(narrow.to(tensor.dtype), tensor.cpu())
    return (narrow if exact else tensor.cpu()).contiguous().clone()


def unpacked(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """A packed linear layer's weight, by multiplying the identity with it: exact but for zeros' signs."""
    columns = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    identity = torch.eye(columns, dtype=weight.dtype)
    columns_first: torch.Tensor = module.cpu_linear(identity, weight, None)
    return columns_first.T


def split(
    name: str, tensor: torch.Tensor, fused: dict[str, list[str]], shapes: dict[str, list[int]]
) -> dict[str, torch.Tensor]:
    """A parameter as the checkpoint tensors that it was put together from, along the first axis."""
    owner, _, key = name.rpartition(".")
    parent, _, last = owner.rpartition(".")
    names = [f"{parent}.{part}.{key}" for part in fused.get(last, [])]
    if not names or any(n not in shapes for n in names):
        return {name: tensor}
    return dict(zip(names, torch.split(tensor, [shapes[n][0] for n in names]), strict=True))
