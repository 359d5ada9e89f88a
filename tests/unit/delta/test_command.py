"""`slipstream delta` gives the new file back byte for byte, and says by its exit code what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner, Result

from slipstream.cli import app

Arrays = dict[str, np.ndarray]


def slipstream(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["delta", *map(str, arguments)])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return save(tmp_path / "old.safetensors", arrays())


@pytest.fixture
def new(tmp_path: Path) -> Path:
    changed = arrays()
    changed["w"][3] = np.nan
    changed["h"] *= 2
    return save(tmp_path / "new.safetensors", changed)


@pytest.fixture
def delta(old: Path, new: Path, tmp_path: Path) -> Path:
    assert slipstream("encode", old, new, tmp_path / "delta").exit_code == 0
    return tmp_path / "delta"


def arrays() -> Arrays:
    return {
        "w": np.arange(5000, dtype=np.float32),
        "h": np.ones((7, 3), np.float16),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.int8),
    }


def save(path: Path, tensors: Arrays) -> Path:
    safetensors.numpy.save_file(tensors, path, metadata={"made by": path.stem, "ü": "ö"})
    return path


def test_the_new_file_comes_back_byte_for_byte(old: Path, new: Path, delta: Path, tmp_path: Path) -> None:
    assert slipstream("apply", old, delta, tmp_path / "out").exit_code == 0
    assert (tmp_path / "out").read_bytes() == new.read_bytes()
    assert delta.stat().st_size < new.stat().st_size / 10


def test_a_file_may_be_brought_up_to_date_in_place(old: Path, new: Path, delta: Path) -> None:
    for _ in range(2):
        assert slipstream("apply", old, delta, old).exit_code == 0
        assert old.read_bytes() == new.read_bytes()


def test_info_tells_what_changed(delta: Path) -> None:
    told = json.loads(slipstream("info", delta, "--json").stdout)
    assert told["delta_bytes"] == delta.stat().st_size
    assert {t["name"] for t in told["tensors"] if t["before"] != t["after"]} == {"w", "h"}
    text = slipstream("info", delta).stdout
    assert "2 of 4 tensors changed" in text
    assert "7 x 3" in text


def other_base(old: Path) -> None:
    save(old, {**arrays(), "w": np.zeros(5000, np.float32)})


def other_names(old: Path) -> None:
    save(old, {"w": arrays()["w"]})


def other_shape(old: Path) -> None:
    save(old, {**arrays(), "h": np.ones((3, 7), np.float16)})


def other_type(old: Path) -> None:
    save(old, {**arrays(), "h": np.ones((7, 3), np.int16)})


def no_safetensors(old: Path) -> None:
    old.write_bytes(b"something else")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (other_base, 10),
        (no_safetensors, 11),
        (other_names, 12),
        (other_shape, 13),
        (other_type, 13),
        (Path.unlink, 14),
    ],
)
def test_apply_says_what_is_wrong_in_one_line_and_writes_nothing(
    spoil: Callable[[Path], None], code: int, old: Path, delta: Path, tmp_path: Path
) -> None:
    spoil(old)
    result = slipstream("apply", old, delta, tmp_path / "out")
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spoil", "code"), [(no_safetensors, 11), (other_names, 12), (other_shape, 13), (Path.unlink, 14)]
)
def test_encode_says_what_is_wrong(
    spoil: Callable[[Path], None], code: int, old: Path, new: Path, tmp_path: Path
) -> None:
    spoil(new)
    result = slipstream("encode", old, new, tmp_path / "delta")
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1)
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize("where", [0, 30, -1])
def test_a_damaged_delta_is_refused(where: int, old: Path, delta: Path, tmp_path: Path) -> None:
    data = bytearray(delta.read_bytes())
    data[where] ^= 1
    delta.write_bytes(data)
    assert slipstream("apply", old, delta, tmp_path / "out").exit_code == 11
    assert slipstream("info", delta).exit_code == 11


def test_an_empty_delta_file_is_damaged_and_a_missing_one_missing(old: Path, tmp_path: Path) -> None:
    (tmp_path / "delta").touch()
    assert slipstream("apply", old, tmp_path / "delta", tmp_path / "out").exit_code == 11
    assert slipstream("info", tmp_path / "no delta").exit_code == 14


def test_a_place_that_cannot_be_written_is_named(old: Path, new: Path, tmp_path: Path) -> None:
    result = slipstream("encode", old, new, tmp_path / "no" / "delta")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


def test_an_unknown_codec_is_wrong_usage(old: Path, new: Path, tmp_path: Path) -> None:
    result = slipstream("encode", old, new, tmp_path / "delta", "--codec", "zip")
    assert result.exit_code == 2
    assert "known are raw, xor-zstd" in result.stderr
