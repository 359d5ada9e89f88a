"""The type that an engine computes in, and from its layouts back to the checkpoint's."""

from typing import Any

import torch


def compute_type(name: str, *, on_cpu: bool) -> torch.dtype:
    """`bfloat16` or `float32`; `auto` is float32 on a CPU without bf16 instructions, as in the trainer."""
    if name == "auto":
        name = "float32" if on_cpu and not torch.cpu._is_avx512_bf16_supported() else "bfloat16"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def narrowed(tensor: torch.Tensor, stored: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """In the type that it was published in, when it is computed with in a wider one and holds nothing
    finer."""
    narrow = tensor.cpu().to(stored)
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
