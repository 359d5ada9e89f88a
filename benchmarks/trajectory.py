"""Real training steps to measure deltas on: a small language model learns sums by GRPO.

Completions are sampled from the model itself and scored by the arithmetic example's reward; advantages are
normalised within each group; AdamW steps fp32 masters, whose bf16 rounding is what a trainer publishes. Every
learning rate sees the same batches from the same start.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from slipstream_trainer.losses import resolve
from slipstream_trainer.model import AdamW, Policy
from slipstream_trainer.packing import Row, Sample, pack

from examples.arithmetic.recipe import prompts, reward
from slipstream.delta import Weights
from slipstream.recipe import Completion, Prompt

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
GROUPS, GROUP_SIZE, MAX_TOKENS = 2, 8, 12


@dataclass(frozen=True)
class Batch:
    """What one step learns from."""

    rows: list[Row]
    advantages: torch.Tensor
    """[S] by sample."""


def batches(policy: Policy, count: int, seed: int = 0) -> list[Batch]:
    """Samples `count` batches of 2 groups of 8 completions from the policy as it stands."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy.path, local_files_only=True)
    torch.manual_seed(seed)
    sums = prompts(random.Random(seed))
    return [_batch(policy, tokenizer, [next(sums) for _ in range(GROUPS)]) for _ in range(count)]


def _batch(policy: Policy, tokenizer: Any, asked: Sequence[Prompt]) -> Batch:
    samples, advantages = [], []
    for prompt in asked:
        ids = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            made = policy._module.generate(
                **ids,
                do_sample=True,
                num_return_sequences=GROUP_SIZE,
                max_new_tokens=MAX_TOKENS,
                top_k=0,
                pad_token_id=tokenizer.eos_token_id,
            )
        start = ids["input_ids"].shape[1]
        rewards = []
        for row in made[:, start:].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            samples.append(Sample(ids["input_ids"][0].tolist(), row[:end], 1.0))
            text = tokenizer.decode(row[:end], skip_special_tokens=True)
            rewards.append(reward(prompt, Completion(text)))
        scores = torch.tensor(rewards)
        advantages.append((scores - scores.mean()) / (scores.std() + 1e-6))
    return Batch(pack(samples, 1024), torch.cat(advantages))


def steps(policy: Policy, taken: Sequence[Batch], learning_rate: float) -> Iterator[Weights]:
    """The weights before the first step and after each one, starting anew from the base model."""
    policy.reset(AdamW())
    loss = resolve("grpo", {})
    yield policy.weights()
    for batch in taken:
        for row in batch.rows:
            logp = policy.forward(row).logp
            values, _ = loss(logp, logp.detach(), batch.advantages[torch.from_numpy(row.sample)])
            policy.backward(values.mean())
        policy.step(learning_rate, 1.0)
        yield policy.weights()
