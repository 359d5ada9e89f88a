"""The one-buffer log-probs against plain autograd."""

import pytest
import torch
from slipstream_trainer.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_plain_log_softmax(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(70, 33, generator=generator)).requires_grad_()
    predictor = torch.randint(
        0, 70, (200,), generator=generator
    )  # rows that predict several tokens, and none
    target = torch.randint(0, 33, (200,), generator=generator)
    weight = torch.randn(200, generator=generator)
    kept = logits.detach().clone()

    plain = (logits / temperature).log_softmax(-1)
    expected = plain[predictor, target]
    (slope,) = torch.autograd.grad((expected * weight).sum(), logits)
    logp, entropy = token_logprobs(logits, temperature, predictor, target)
    (found,) = torch.autograd.grad((logp * weight).sum(), logits)
    torch.testing.assert_close(logp, expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(found, slope, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1)[predictor].detach())
    assert not entropy.requires_grad
    assert torch.equal(logits.detach(), kept)


def test_bf16_logits_are_worked_on_in_fp32() -> None:
    logits = torch.randn(4, 9, dtype=torch.bfloat16).requires_grad_()
    index = torch.arange(4)
    logp, _ = token_logprobs(logits, 1.0, index, index)
    assert torch.equal(logp, token_logprobs(logits.float(), 1.0, index, index)[0])
    (grad,) = torch.autograd.grad(logp.sum(), logits)
    assert grad.dtype == torch.bfloat16


def test_a_certain_and_an_impossible_token_give_finite_numbers() -> None:
    logits = torch.tensor([[0.0, -1e30], [float("-inf"), 0.0]]).requires_grad_()
    logp, entropy = token_logprobs(logits, 1.0, torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert logp.tolist() == [0.0, 0.0]
    assert entropy.tolist() == [0.0, 0.0]
