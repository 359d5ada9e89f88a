"""Checkpoints: whole or not there, refused when damaged, and a full disk is said clearly."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slipstream_trainer import checkpoint
from slipstream_trainer.checkpoint import Checkpoint, State, load, load_newest, names, save

from slipstream.errors import IntegrityError, StoreFullError
from slipstream.pacing import Origin


def make(step: int) -> Checkpoint:
    state = State(
        run_id="r",
        step=step,
        lineage=[Origin(1, 0), Origin(3, 7)],
        model="m",
        offsets={0: 5, 3: 9},
        head=4,
        consumed=[6, 7],
        records=["0a01"],
        recipe_state=b"\x00\xff".hex(),
        optimizer_steps=step,
    )
    weights = {"w": torch.full((3, 2), float(step)), "tied.embed": torch.arange(4.0)}
    return Checkpoint(
        state, weights, {"m/w": torch.ones(3, 2), "v/w": torch.ones(3, 2)}, torch.get_rng_state()
    )


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    name = save(tmp_path, make(12), keep=2)
    assert name == "000003-000000012"
    found = load_newest(tmp_path, "r")
    assert found is not None
    assert found.state == make(12).state
    assert torch.equal(found.masters["w"], make(12).masters["w"])
    assert found.moments.keys() == {"m/w", "v/w"}
    assert torch.equal(found.rng, torch.get_rng_state())
    assert load_newest(tmp_path, "other") is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save(tmp_path, make(step), keep=2)
    assert names(tmp_path / "r") == ["000003-000000010", "000003-000000011"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, make(1), keep=2)
    again = make(1)
    again.masters["w"] += 1
    save(tmp_path, again, keep=2)
    found = load_newest(tmp_path, "r")
    assert found is not None
    assert torch.equal(found.masters["w"], again.masters["w"])
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["000003-000000001"]


def test_what_a_killed_process_left_half_written_is_never_read_and_is_cleared_away(tmp_path: Path) -> None:
    save(tmp_path, make(1), keep=2)
    half = tmp_path / "r" / ".tmp-000003-000000002-abcd"
    shutil.copytree(tmp_path / "r" / "000003-000000001", half)
    found = load_newest(tmp_path, "r")
    assert found is not None
    assert found.state.step == 1
    save(tmp_path, make(3), keep=2)
    assert not half.exists()


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no state", "state cut short"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, make(1), keep=2)
    bad = tmp_path / "r" / save(tmp_path, make(2), keep=2)
    masters, state = bad / "masters.safetensors", bad / "state.json"
    if damage == "truncate":
        masters.write_bytes(masters.read_bytes()[:-1])
    elif damage == "flip":
        data = bytearray(masters.read_bytes())
        data[-1] ^= 1
        masters.write_bytes(data)
    elif damage == "remove":
        (bad / "moments.safetensors").unlink()
    elif damage == "no state":
        state.unlink()
    else:
        state.write_text(state.read_text()[:-20])
    with pytest.raises(IntegrityError, match="000003-000000002"):
        load(bad)
    found = load_newest(tmp_path, "r")
    assert found is not None
    assert found.state.step == 1


def test_when_all_are_damaged_the_run_is_not_silently_begun_anew(tmp_path: Path) -> None:
    bad = tmp_path / "r" / save(tmp_path, make(1), keep=1)
    document = json.loads((bad / "state.json").read_text())
    (bad / "state.json").write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(IntegrityError, match=r"no whole one is left. Remove"):
        load_newest(tmp_path, "r")


def test_a_full_disk_is_named_and_older_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, make(1), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(StoreFullError, match="SLIPSTREAM_TRAINER_CHECKPOINT_DIR"):
            save(tmp_path, make(2), keep=2)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)  # the disk fills up in the middle
        with pytest.raises(StoreFullError, match="no room for a checkpoint"):
            save(tmp_path, make(2), keep=2)
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["000003-000000001"]
