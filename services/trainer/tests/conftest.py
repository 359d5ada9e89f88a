"""Fixtures of the trainer's tests."""

import importlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from slipstream_trainer.model import Policy
from slipstream_weightsync.service import WeightSync
from slipstream_weightsync.settings import WeightsyncSettings

from slipstream.bus.events import ensure_topics
from slipstream.bus.memory import MemoryLog
from slipstream.settings import CommonSettings, load
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer import Cluster, FrailStore, serving

# Slow to import: here, so that no test's time limit pays for it.
importlib.import_module("transformers.models.llama.modeling_llama")
importlib.import_module("transformers.models.auto.modeling_auto")
importlib.import_module("transformers.quantizers")
# Tensors here are tiny: a second thread costs more than it brings, all the more on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    return Policy(str(model_dir), device="cpu", compute="float32")


@pytest.fixture
async def cluster(model_dir: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(MemoryLog(), FrailStore(), load(CommonSettings, {}), model_dir, tmp_path / "checkpoints")
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(
            serving(WeightSync(made.context("weightsync", load(WeightsyncSettings, {}))))
        )
        made.common = load(CommonSettings, {"SLIPSTREAM_WEIGHTSYNC_TARGET": target})
        await ensure_topics(made.bus, made.common)
        yield made
