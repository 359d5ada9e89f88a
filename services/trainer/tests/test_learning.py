"""The whole training side learns: a tiny random model comes to write the character it is rewarded for."""

import torch
from slipstream_trainer.batches import Arrived
from slipstream_trainer.gradient import Chosen, compute
from slipstream_trainer.losses import resolve
from slipstream_trainer.model import AdamW, Policy

from slipstream.pacing import Origin
from tests.support.trainer import scored_group

WANTED, NEW, GROUPS, SAMPLES = 42, 4, 4, 8


def sample(
    policy: Policy, prompt: list[int], generator: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    """(tokens, log-probs) of completions sampled from the policy as it stands."""
    ids = torch.tensor([prompt] * SAMPLES)
    logprobs = []
    for _ in range(NEW):
        with torch.no_grad():
            logp = policy._module(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        logprobs.append(logp.gather(1, token))
        ids = torch.cat([ids, token], 1)
    return ids[:, len(prompt) :].tolist(), torch.cat(logprobs, 1).tolist()


def test_mean_reward_rises_from_almost_nothing_to_almost_all(policy: Policy) -> None:
    policy.reset(AdamW())
    generator = torch.Generator().manual_seed(0)
    history = []
    for step in range(14):
        chosen, rewards_seen = [], []
        for g in range(GROUPS):
            tokens, logprobs = sample(policy, [1, 3, 10 + g, 2, 4], generator)
            rewards = [sum(t == WANTED for t in c) / NEW for c in tokens]
            group = scored_group(g, tokens, prompt=[1, 3, 10 + g, 2, 4], logprobs=logprobs, rewards=rewards)
            group.rollout.prompt.num_samples = SAMPLES
            mean = sum(rewards) / SAMPLES
            chosen += [Chosen(Arrived(group, 0, g), i, r - mean) for i, r in enumerate(rewards)]
            rewards_seen += rewards
        history.append(sum(rewards_seen) / len(rewards_seen))
        found = compute(policy, chosen, resolve("grpo", {}), 64, [Origin(1, 0)], 0)
        # Sampler and trainer are one program with the same weights: what is left is rounding.
        assert all(s.k3 < 1e-8 for stats in found.by_group.values() for s in stats), step
        policy.step(1e-2, 1.0)
    assert history[0] < 0.1
    assert sum(history[-3:]) / 3 > 0.8
