"""Weights for tests: Hypothesis strategies over every type and shape, and a tiny run."""

from collections.abc import Mapping

import numpy as np
from hypothesis import strategies as st

from slipstream.delta.tensors import DTYPES, RawTensor, tensor_bytes
from slipstream.errors import ConfigError

_SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
_NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable())


def tensor(data: bytes | np.ndarray, dtype: str = "BF16", shape: tuple[int, ...] | None = None) -> RawTensor:
    """A tensor with these bytes; one-dimensional unless told."""
    array = np.frombuffer(bytes(data), np.uint8)
    if shape is None:
        shape = (array.nbytes // (tensor_bytes(dtype, (2,)) // 2 or 1),)
    return RawTensor(dtype, shape, array)


def same(a: Mapping[str, RawTensor], b: Mapping[str, RawTensor]) -> bool:
    """Whether two sets of weights are equal to the bit."""
    return {n: (t.dtype, t.shape, t.data.tobytes()) for n, t in a.items()} == {
        n: (t.dtype, t.shape, t.data.tobytes()) for n, t in b.items()
    }


@st.composite
def tensors(draw: st.DrawFn) -> RawTensor:
    """Any type, any shape (scalars and empty ones too), any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(_SHAPES.filter(lambda shape: _whole(dtype, shape)))
    size = tensor_bytes(dtype, shape)
    return RawTensor(dtype, shape, np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, RawTensor], dict[str, RawTensor]]:
    """Weights before and after: unchanged, changed in single bits, or changed altogether."""
    old = draw(st.dictionaries(_NAMES, tensors(), max_size=5))
    new = {}
    for name, before in old.items():
        data = before.data.copy()
        for bit in draw(st.lists(st.integers(0, max(data.size * 8 - 1, 0)), max_size=4)):
            if data.size:
                data[bit // 8] ^= 1 << bit % 8
        if draw(st.booleans()) and draw(st.booleans()):
            data = np.frombuffer(draw(st.binary(min_size=data.size, max_size=data.size)), np.uint8)
        new[name] = RawTensor(before.dtype, before.shape, data)
    return old, new


def _whole(dtype: str, shape: tuple[int, ...]) -> bool:
    try:
        tensor_bytes(dtype, shape)
    except ConfigError:
        return False
    return True


def make_model(seed: int = 0, *, size: int = 1000) -> dict[str, RawTensor]:
    """A few bf16 tensors with random bits."""
    random = np.random.default_rng(seed)
    shapes = {"embed": (size, 4), "layer.0.w": (size,), "layer.1.w": (size,), "norm": (3,), "scale": ()}
    return {
        name: RawTensor("BF16", shape, random.integers(0, 256, tensor_bytes("BF16", shape), np.uint8))
        for name, shape in shapes.items()
    }


def step(weights: Mapping[str, RawTensor], seed: int, *, names: tuple[str, ...] = ()) -> dict[str, RawTensor]:
    """The weights after a step that moves about one element in a hundred of the named tensors (default all
    but `norm`) by one unit in the last place."""
    random = np.random.default_rng(seed)
    after = {}
    for name, before in weights.items():
        data = before.data.copy()
        if name in (names or tuple(n for n in weights if n != "norm")):
            elements = data.view("<u2")
            elements[random.integers(0, elements.size, max(1, elements.size // 100))] ^= 1
        after[name] = RawTensor(before.dtype, before.shape, data)
    return after
