"""Log-probabilities of chosen tokens and entropies from logits, in one buffer and few passes over it.

A vocabulary makes logits the largest tensor of a step: R x V numbers, 140 MB for 700 tokens of SmolLM2. Plain
log_softmax, gather and entropy, with their gradients, read and write that some fifteen times.
"""

from typing import Any

import torch
from torch import Tensor

_ROWS = 32
"""Rows worked on at once, so that what is written is read again from the cache."""


def token_logprobs(
    logits: Tensor, temperature: float, predictor: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """(log p(target) with gradient, entropy without), both `[T]`, of softmax(logits / temperature).

    Args:
        logits: `[R, V]`; read only.
        predictor: `[T]` row of the distribution that each token was drawn from.
        target: `[T]` the token.
    """
    logp, entropy = _TokenLogprobs.apply(logits, temperature, predictor, target)  # type: ignore[no-untyped-call]
    return logp, entropy[predictor]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperature: float, predictor: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = logits.to(torch.float32, copy=True)
        if temperature != 1:
            x /= temperature
        norm, entropy = x.new_empty(len(x)), x.new_empty(len(x))
        at_target = x[predictor, target]
        for rows in range(0, len(x), _ROWS):
            part = slice(rows, rows + _ROWS)
            norm[part] = x[part].logsumexp(-1)
            x[part] -= norm[part, None]
            probabilities = x[part].exp()
            # A token of probability zero adds nothing, not 0 * -inf.
            entropy[part] = -(probabilities * x[part].clamp_min(-1e4)).sum(-1)
            x[part] = probabilities
        ctx.save_for_backward(x, predictor, target)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return at_target - norm[predictor], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        probabilities, predictor, target = ctx.saved_tensors
        # d log p_t / d logits = (one-hot(t) - p) / temperature, summed over the tokens of a row.
        grad = grads[0] / ctx.temperature
        per_row = torch.zeros(len(probabilities), device=grad.device).index_add_(0, predictor, grad)
        result = probabilities * -per_row[:, None]
        result.index_put_((predictor, target), grad, accumulate=True)
        return result.to(ctx.dtype), None, None, None
