"""Checkpoints: everything needed to go on, in one directory that exists whole or not at all.

    <root>/<run>/<epoch>-<step>/      zero-padded, so that names sort by age
        masters.safetensors           fp32 weights
        moments.safetensors           AdamW's, `m/<name>` and `v/<name>`
        rng.safetensors               state of the random generator
        state.json                    step, lineage, offsets, consumed groups, ...; digests of the rest

The directory is written under a temporary name, flushed to disk, then renamed.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import IntegrityError, StoreFullError
from slipstream.pacing import Origin

_log = logging.getLogger(__name__)
_FORMAT = 1
_STATE = "state.json"
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class State:
    """The small part of a checkpoint."""

    run_id: str
    step: int
    lineage: list[Origin]
    model: str
    """Path of the base model."""
    offsets: dict[int, int]
    """Next offset to read per partition of `samples`."""
    head: int
    """Lowest sequence number not consumed."""
    consumed: list[int]
    """Sequence numbers above the head that are consumed."""
    records: list[str] = field(default_factory=list)
    """Void and dropped groups (GroupRecord, hex) that no StepRecord has named yet."""
    recipe_state: str = ""
    """The loop's own state, hex."""
    optimizer_steps: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    state: State
    masters: dict[str, Tensor]
    moments: dict[str, Tensor]
    rng: Tensor


def save(root: Path, checkpoint: Checkpoint, *, keep: int) -> str:
    """Writes a checkpoint and removes all but the newest `keep` of the run; returns its name. Blocking.

    Raises:
        StoreFullError: the disk has no room; older checkpoints are untouched.
    """
    state = checkpoint.state
    name = f"{state.lineage[-1].epoch:06d}-{state.step:09d}"
    run = root / state.run_id
    temporary, final = run / f"{_TEMPORARY}{name}-{uuid.uuid4().hex[:8]}", run / name
    tensors = {"masters": checkpoint.masters, "moments": checkpoint.moments, "rng": {"rng": checkpoint.rng}}
    needed = sum(t.nbytes for part in tensors.values() for t in part.values())
    with _full_disk_said_clearly(run, needed):
        temporary.mkdir(parents=True)
        try:
            files = {
                f"{part}.safetensors": _write(temporary / f"{part}.safetensors", tensors[part])
                for part in tensors
            }
            document = {"format": _FORMAT, **asdict(state), "files": files}
            (temporary / _STATE).write_text(json.dumps(document))
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            if final.exists():  # the same step saved again: the newer recipe state counts
                os.rename(final, run / f"{_TEMPORARY}old-{uuid.uuid4().hex[:8]}")
            os.rename(temporary, final)
            _sync(run)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    _prune(run, keep)
    return name


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    host = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(host, path)
    return {"bytes": path.stat().st_size, "xxh3": _digest(path)}


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _full_disk_said_clearly(run: Path, needed: int) -> Iterator[None]:
    run.mkdir(parents=True, exist_ok=True)
    full = StoreFullError(
        f"no room for a checkpoint of {needed / 1e6:.0f} MB in {run}: make room or set "
        "SLIPSTREAM_TRAINER_CHECKPOINT_DIR to another disk, then save again; older checkpoints are untouched"
    )
    if shutil.disk_usage(run).free < needed:
        raise full
    try:
        yield
    except Exception as error:
        # safetensors reports a full disk in its own error type, by its text only.
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error):
            raise full from error
        raise


def _prune(run: Path, keep: int) -> None:
    for path in (*names(run)[:-keep], *(p.name for p in run.glob(f"{_TEMPORARY}*"))):
        shutil.rmtree(run / path, ignore_errors=True)


def names(run: Path) -> list[str]:
    """Checkpoints of a run directory, oldest first."""
    if not run.is_dir():
        return []
    return sorted(p.name for p in run.iterdir() if p.is_dir() and not p.name.startswith("."))


def load_newest(root: Path, run_id: str) -> Checkpoint | None:
    """The newest whole checkpoint of a run; None when it has none at all. Blocking.

    A damaged one is skipped with a warning, for the one before it.

    Raises:
        IntegrityError: there are checkpoints, and all of them are damaged.
    """
    run = root / run_id
    damage = ""
    for name in reversed(names(run)):
        try:
            return load(run / name)
        except IntegrityError as error:
            damage = str(error)
            _log.warning("%s; going back to the checkpoint before it", error)
    if damage:
        raise IntegrityError(f"{damage}; no whole one is left. Remove {run} to begin the run anew")
    return None


def load(directory: Path) -> Checkpoint:
    """Reads and checks one checkpoint. Blocking.

    Raises:
        IntegrityError: a file is missing, cut short or altered.
    """
    try:
        document = json.loads((directory / _STATE).read_text())
        files = document.pop("files")
        if document.pop("format") != _FORMAT:
            raise IntegrityError(f"checkpoint {directory} is of another format than {_FORMAT}")
        state = State(**document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"checkpoint {directory} is not whole: {_STATE}: {error}") from None
    for name, facts in files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != facts["bytes"] or _digest(path) != facts["xxh3"]:
            raise IntegrityError(f"checkpoint {directory} is damaged: {name} is missing or altered")
    return Checkpoint(
        _typed(state),
        load_file(directory / "masters.safetensors"),
        load_file(directory / "moments.safetensors"),
        load_file(directory / "rng.safetensors")["rng"],
    )


def _typed(state: State) -> State:
    # JSON turns tuples into lists and integer keys into text.
    values = dict(vars(state))
    values["lineage"] = [Origin(*origin) for origin in state.lineage]
    values["offsets"] = {int(partition): offset for partition, offset in state.offsets.items()}
    return State(**values)


def set_rng_state(state: Tensor) -> None:
    """Puts torch's generator back."""
    torch.set_rng_state(state)
