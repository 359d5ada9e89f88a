"""Packs samples so that what they share is computed once. Pure.

The samples of a micro-batch form a tree of tokens: samples of a group share the prompt, groups share a system
prompt or worked examples, and completions share whatever they begin with. A row is that tree in preorder. A
token attends to its ancestors and itself, and its position is its depth, so every sample sees exactly what it
would see alone.

With `end[j]` one past the last descendant of j, j is an ancestor of i, or i itself, if `j <= i < end[j]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One completion with its prompt."""

    prompt: Sequence[int]
    """At least one token."""
    completion: Sequence[int]
    temperature: float


@dataclass(frozen=True)
class Row:
    """Samples packed into one sequence of N tokens, R of which predict the T sampled tokens."""

    tokens: Ints
    """[N] token ids."""
    positions: Ints
    """[N] depth of each token."""
    end: Ints
    """[N] one past each token's last descendant."""
    predictors: Ints
    """[R] places, ascending, whose logits predict sampled tokens."""
    temperature: float
    """Of all samples in the row."""
    sample: Ints
    """[T] index of the sample that each sampled token belongs to, in the order given to `pack`."""
    predictor: Ints
    """[T] index into `predictors`."""
    target: Ints
    """[T] the sampled token's id. Tokens of a sample are in order; samples follow each other."""

    def mask(self) -> NDArray[np.bool_]:
        """[N, N], true where the row's token (first index) attends to the column's token."""
        i = np.arange(len(self.tokens))
        return (i[None, :] <= i[:, None]) & (i[:, None] < self.end[None, :])


@dataclass
class _Tree:
    """Tokens in the order of insertion; node 0 is a root without token."""

    token: list[int] = field(default_factory=lambda: [-1])
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])

    def missing(self, path: Sequence[int]) -> int:
        """How many tokens of the path are not in the tree."""
        node = 0
        for depth, token in enumerate(path):
            if token not in self.children[node]:
                return len(path) - depth
            node = self.children[node][token]
        return 0

    def insert(self, path: Sequence[int]) -> list[int]:
        """Adds a path from the root; returns its nodes."""
        node, nodes = 0, []
        for token in path:
            child = self.children[node].get(token)
            if child is None:
                child = len(self.token)
                self.children[node][token] = child
                self.token.append(token)
                self.children.append({})
            node = child
            nodes.append(node)
        return nodes

    def preorder(self) -> tuple[Ints, Ints, Ints, Ints]:
        """(tokens, depths, ends) in preorder, and each node's place in it."""
        order: list[int] = []
        depths: list[int] = []
        place = np.full(len(self.token), -1, np.int64)
        ends = np.zeros(len(self.token) - 1, np.int64)
        stack = [(child, 0) for child in reversed(self.children[0].values())]
        while stack:
            node, depth = stack.pop()
            if node < 0:
                ends[place[~node]] = len(order)
                continue
            place[node] = len(order)
            order.append(node)
            depths.append(depth)
            stack.append((~node, depth))
            stack.extend((child, depth + 1) for child in reversed(self.children[node].values()))
        tokens = np.array([self.token[node] for node in order], np.int64)
        return tokens, np.array(depths, np.int64), ends, place


def pack(samples: Sequence[Sample], budget: int) -> list[Row]:
    """Packs samples, in order, into rows of at most `budget` tokens; a longer sample gets its own row.

    Samples without sampled tokens are left out. A row holds samples of one temperature.
    """
    rows: list[Row] = []
    open_rows: dict[float, tuple[_Tree, list[tuple[int, list[int]]]]] = {}

    def close(temperature: float) -> None:
        tree, paths = open_rows.pop(temperature)
        rows.append(_row(tree, paths, samples, temperature))

    for index, sample in enumerate(samples):
        if not sample.completion:
            continue
        # The last token predicts nothing, so it needs no place unless another sample goes on from there.
        path = [*sample.prompt, *sample.completion[:-1]]
        tree, _ = open_rows.get(sample.temperature, (None, None))
        if tree is not None and len(tree.token) - 1 + tree.missing(path) > budget:
            close(sample.temperature)
        tree, paths = open_rows.setdefault(sample.temperature, (_Tree(), []))
        paths.append((index, tree.insert(path)))
    for temperature in list(open_rows):
        close(temperature)
    return rows


def _row(
    tree: _Tree, paths: list[tuple[int, list[int]]], samples: Sequence[Sample], temperature: float
) -> Row:
    tokens, positions, end, place = tree.preorder()
    sample: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    for index, nodes in paths:
        completion = samples[index].completion
        sample.extend([index] * len(completion))
        predictors.extend(nodes[-len(completion) :])
        targets.extend(completion)
    unique, predictor = np.unique(place[np.array(predictors, np.int64)], return_inverse=True)
    return Row(
        tokens=tokens,
        positions=positions,
        end=end,
        predictors=unique,
        temperature=temperature,
        sample=np.array(sample, np.int64),
        predictor=predictor.astype(np.int64),
        target=np.array(targets, np.int64),
    )
