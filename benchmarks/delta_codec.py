"""Size and speed of a delta on weights shaped like a small language model's. Prints JSON.

    python benchmarks/delta_codec.py [--changed 0.0037 0.017] [--old DIR --new DIR]

Without checkpoints, weights are made up: bf16 matrices of SmolLM2-135M's shapes, normal with standard
deviation 0.05, of which a share of elements moves by one unit in the last place (the smaller the weight, the
likelier, as under Adam). The default shares are those measured on real GRPO steps at learning rates 1e-6 and
1e-5. `--old` and `--new` take two real checkpoint directories instead.

Times are the best of `--repeat`: on a busy machine the others measure the neighbours. `cpu_s` is the
process's own time over all threads.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slipstream.delta import RawTensor, Weights, apply_delta, encode_delta, load_checkpoint
from slipstream.delta.container import digests_of
from slipstream.delta.tensors import size_bytes
from slipstream.weights.publisher import changed_share

T = TypeVar("T")


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of SmolLM2-135M (tied head)."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (49152, 576),
        "model.norm.weight": (576,),
    }
    for layer in range(30):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "input_layernorm": (576,),
            "mlp.down_proj": (576, 1536),
            "mlp.gate_proj": (1536, 576),
            "mlp.up_proj": (1536, 576),
            "post_attention_layernorm": (576,),
            "self_attn.k_proj": (192, 576),
            "self_attn.o_proj": (576, 576),
            "self_attn.q_proj": (576, 576),
            "self_attn.v_proj": (192, 576),
        }.items():
            found[f"{prefix}{name}.weight"] = shape
    return found


def made_up(share: float, seed: int = 0) -> tuple[Weights, Weights]:
    random = np.random.default_rng(seed)
    old, new = {}, {}
    for name, shape in shapes().items():
        values = (random.standard_normal(int(np.prod(shape))) * 0.05).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        # A step of size s moves a weight w to the next bf16 with a chance of about s / |w|.
        chance = 1 / np.maximum(np.abs(values), 1e-4)
        hit = random.random(bits.size) < chance * (share / chance.mean())
        moved = bits + np.where(hit, random.choice(np.array([1, 0xFFFF], np.uint16), bits.size), 0).astype(
            np.uint16
        )
        old[name] = RawTensor("BF16", shape, bits.view(np.uint8))
        new[name] = RawTensor("BF16", shape, moved.view(np.uint8))
    return old, new


def timed(function: Callable[[], T], repeat: int) -> tuple[dict[str, float], T]:
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        result = function()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"wall_s": min(walls), "cpu_s": min(cpus)}, result


def measure(old: Weights, new: Weights, codec: str, repeat: int) -> dict[str, Any]:
    size = size_bytes(new)
    encode, (blob, _) = timed(lambda: encode_delta(old, new, codec), repeat)
    apply, out = timed(lambda: apply_delta(old, blob), repeat)
    hashing, _ = timed(lambda: digests_of(old), repeat)
    if any(not np.array_equal(out[name].data, tensor.data) for name, tensor in new.items()):
        raise SystemExit("the delta is not exact")
    changed = changed_share(old, new)
    elements = sum(t.data.size // t.itemsize for t in new.values())
    return {
        "codec": codec,
        "changed": changed,
        "full_bytes": size,
        "delta_bytes": len(blob),
        "ratio": size / len(blob),
        "bytes_per_change": len(blob) / max(1, round(changed * elements)),
        "encode": encode | {"gb_per_s": size / encode["wall_s"] / 1e9},
        "apply": apply | {"gb_per_s": size / apply["wall_s"] / 1e9},
        "digest_once": hashing | {"gb_per_s": size / hashing["wall_s"] / 1e9},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--changed", type=float, nargs="+", default=[0.0037, 0.017])
    parser.add_argument("--codec", default="xor-zstd")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    args = parser.parse_args()
    if (args.old is None) != (args.new is None):
        parser.error("--old and --new belong together")
    if args.old is not None:
        pairs: list[tuple[Weights, Weights]] = [(load_checkpoint(args.old), load_checkpoint(args.new))]
    else:
        pairs = [made_up(share) for share in args.changed]
    results = [measure(old, new, args.codec, args.repeat) for old, new in pairs]
    print(json.dumps({"cores": os.cpu_count(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
