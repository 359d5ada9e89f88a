"""Time of one training step's forward and backward: packed as the trainer does it, beside padded rows.

    python benchmarks/trainer_step.py --model DIR [--groups 8 --samples 8 --shared 45 --prompt 15 --new 12]

Every group's prompt begins with the same `shared` tokens (a system prompt, worked examples), then has
`prompt` of its own. Completions are random: only prompts are shared, where real ones have more in common.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from slipstream_trainer.losses import resolve
from slipstream_trainer.model import Policy
from slipstream_trainer.packing import Sample, pack
from torch import Tensor


def samples_of(args: argparse.Namespace, vocab: int) -> list[Sample]:
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return [int(t) for t in rng.integers(5, vocab - 1, count)]

    shared = draw(args.shared)
    prompts = [[*shared, *draw(args.prompt)] for _ in range(args.groups)]
    return [Sample(p, draw(args.new), 1.0) for p in prompts for _ in range(args.samples)]


def packed(policy: Policy, samples: list[Sample], budget: int) -> tuple[int, float]:
    """(tokens computed, loss)"""
    loss, total = resolve("grpo", {}), 0.0
    rows = pack(samples, budget)
    for row in rows:
        logp = policy.forward(row).logp
        values, _ = loss(logp, logp.detach(), _signs(torch.from_numpy(row.sample)))
        policy.backward(values.mean())
        total += float(values.detach().mean())
    return sum(len(row.tokens) for row in rows), total


def padded(policy: Policy, samples: list[Sample], budget: int) -> tuple[int, float]:
    """The usual way: one row a sample, padded to the longest, logits of completion places only."""
    loss, total = resolve("grpo", {}), 0.0
    length, new = len(samples[0].prompt) + len(samples[0].completion), len(samples[0].completion)
    size = max(1, budget // length)
    for start in range(0, len(samples), size):
        chunk = samples[start : start + size]
        ids = torch.tensor([[*s.prompt, *s.completion] for s in chunk])
        logits = policy._module(input_ids=ids, use_cache=False, logits_to_keep=new + 1).logits[:, :-1].float()
        logp = logits.gather(-1, ids[:, -new:, None])[..., 0] - logits.logsumexp(-1)
        values, _ = loss(logp, logp.detach(), _signs(torch.arange(start, start + len(chunk)))[:, None])
        policy.backward(values.mean())
        total += float(values.detach().mean())
    return length * len(samples), total


def _signs(index: Tensor) -> Tensor:
    return 1.0 - 2.0 * (index % 2)


def measure(work: Callable[[], tuple[int, float]], policy: Policy, repeats: int) -> dict[str, float]:
    seconds, cpu, tokens = [], [], 0
    for _ in range(repeats):
        wall, process = time.perf_counter(), time.process_time()
        tokens, _ = work()
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - process)
        policy.clear_gradients()
    return {"tokens": tokens, "seconds": round(min(seconds), 2), "cpu_seconds": round(min(cpu), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    for name, default in (("groups", 8), ("samples", 8), ("shared", 45), ("prompt", 15), ("new", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--only", choices=["packed", "padded", "step"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = Policy(args.model, device="cpu", compute=args.compute)
    samples = samples_of(args, policy.vocab_size)
    result: dict[str, object] = {
        "compute": str(policy.compute),
        "samples": len(samples),
        "budget": args.budget,
    }
    if args.only in (None, "packed"):
        result["packed"] = measure(lambda: packed(policy, samples, args.budget), policy, args.repeats)
    if args.only in (None, "padded"):
        result["padded"] = measure(lambda: padded(policy, samples, args.budget), policy, args.repeats)
    if args.only in (None, "step"):
        packed(policy, samples[:8], args.budget)
        began = time.perf_counter()
        policy.step(1e-6, 1.0)
        result["optimizer_s"] = round(time.perf_counter() - began, 2)
        began = time.perf_counter()
        policy.weights()
        result["copy_s"] = round(time.perf_counter() - began, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
