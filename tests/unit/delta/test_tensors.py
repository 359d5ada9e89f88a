"""safetensors files are read as the reference reads them, and refused where they are malformed."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from slipstream.delta.tensors import (
    RawTensor,
    load_checkpoint,
    load_safetensors,
    parse_safetensors,
    read_metadata,
    safetensors_bytes,
    write_safetensors,
)
from slipstream.errors import ConfigError, IntegrityError, StoreFullError
from tests.support.weights import make_model, same, tensors


@given(st.dictionaries(st.text(min_size=1).filter(lambda n: n != "__metadata__"), tensors(), max_size=5))
def test_what_is_written_is_read_again(weights: dict[str, RawTensor]) -> None:
    blob = safetensors_bytes(weights, {"format": "pt"})
    assert same(parse_safetensors(blob), weights)
    assert read_metadata(blob) == {"format": "pt"}


def test_the_reference_implementation_reads_what_is_written(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(7, np.int64),
        "c": np.ones(3, np.int8),
    }
    weights = {
        name: RawTensor({4: "F32", 8: "I64", 1: "I8"}[x.itemsize], x.shape, x.reshape(-1).view(np.uint8))
        for name, x in arrays.items()
    }
    write_safetensors(tmp_path / "w.safetensors", weights)
    found = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    assert {n: (x.dtype, x.shape, x.tobytes()) for n, x in found.items()} == {
        n: (x.dtype, x.shape, x.tobytes()) for n, x in arrays.items()
    }


def test_what_the_reference_writes_is_read(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "z": np.ones(3, np.int8),
        "a": np.arange(6, dtype=np.float64),
        "e": np.zeros((0, 2), np.float16),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "w.safetensors", metadata={"k": "v"})
    found = load_safetensors(tmp_path / "w.safetensors")
    assert {n: (t.shape, t.data.tobytes()) for n, t in found.items()} == {
        n: (x.shape, x.tobytes()) for n, x in arrays.items()
    }


def raw(header: object, data: bytes = b"1234") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def place(begin: int = 0, end: int = 4, dtype: Any = "U8", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"1234567",
        (100).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") + b"{}",
        raw(b"{"),
        raw(b"\xff\xff"),
        raw(b"[" * 200_000),
        raw([]),
        raw({"__metadata__": [], "a": place()}),
        raw({"a": None}),
        raw({"a": place(shape=None)}),
        raw({"a": place(shape=[4.0])}),
        raw({"a": place(shape=[True, 4])}),
        raw({"a": place(shape=[-2, -2])}),
        raw({"a": place(dtype="U9")}),
        raw({"a": place(dtype="U16")}),
        raw({"a": place(dtype="F4", shape=[3], end=1)}, b"1"),
        raw({"a": place(-4, 0)}),
        raw({"a": place(4, 0)}),
        raw({"a": place()}, b"123"),
        raw({"a": place()}, b"12345"),
        raw({"a": place(), "b": place()}),
        raw({"a": place(0, 1, shape=[1]), "b": place(2, 4, shape=[2])}),
        raw(
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
        ),
    ],
)
def test_a_malformed_file_is_refused(blob: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_safetensors(blob)


def test_every_cut_is_found() -> None:
    blob = safetensors_bytes(make_model(size=10))
    for end in range(len(blob)):
        with pytest.raises(IntegrityError):
            parse_safetensors(blob[:end])


def test_a_tensor_with_the_wrong_number_of_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"BF16 \[3\] takes 6 bytes, 5 are given"):
        RawTensor("BF16", (3,), np.zeros(5, np.uint8))
    with pytest.raises(ConfigError, match="contiguous array of uint8"):
        RawTensor("U8", (3,), np.zeros(6, np.uint8)[::2])


def test_a_checkpoint_of_several_files_is_one_set_of_weights(tmp_path: Path) -> None:
    model = make_model()
    names = list(model)
    write_safetensors(tmp_path / "model-1.safetensors", {n: model[n] for n in names[:2]})
    write_safetensors(tmp_path / "model-2.safetensors", {n: model[n] for n in names[2:]})
    assert same(load_checkpoint(tmp_path), model)


def test_a_consolidated_copy_beside_the_shards_is_left_alone(tmp_path: Path) -> None:
    model = make_model()
    write_safetensors(tmp_path / "consolidated.safetensors", model)
    write_safetensors(tmp_path / "model-1.safetensors", model)
    with pytest.raises(ConfigError, match="another file"):
        load_checkpoint(tmp_path)
    index = {"weight_map": dict.fromkeys(model, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load_checkpoint(tmp_path), model)


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ConfigError, match=r"model-1.safetensors: No such file"):
        load_checkpoint(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*.safetensors"):
        load_checkpoint(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    write_safetensors(path, make_model(0))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFullError, match="No space left on device"):
        write_safetensors(path, make_model(1))
    assert same(load_safetensors(path), make_model(0))
    assert list(tmp_path.iterdir()) == [path]
