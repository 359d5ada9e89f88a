"""Splits weights into shards of about equal bytes."""

from slipstream.delta.tensors import RawTensor, Weights


def split(weights: Weights, num_shards: int) -> list[dict[str, RawTensor]]:
    """At most `num_shards` parts that together hold every tensor once, none empty.

    Largest first into the lightest part; equal sizes by name, so that every process splits alike.
    """
    parts: list[dict[str, RawTensor]] = [{} for _ in range(max(1, min(num_shards, len(weights))))]
    sizes = [0] * len(parts)
    for name in sorted(weights, key=lambda n: (-weights[n].data.nbytes, n)):
        lightest = sizes.index(min(sizes))
        parts[lightest][name] = weights[name]
        sizes[lightest] += weights[name].data.nbytes
    return parts
