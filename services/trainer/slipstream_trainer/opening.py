"""Taking a run over: a new epoch, the newest checkpoint or the base model, the first version of the epoch."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from slipstream import rpc
from slipstream.blobs import BlobStore
from slipstream.bus import Bus
from slipstream.bus.outage import Outage
from slipstream.clock import Clock
from slipstream.errors import ConfigError
from slipstream.pacing import Origin, Window, window_size
from slipstream.v1.train_pb2 import GroupRecord
from slipstream.v1.trainer_service_pb2 import RunConfig
from slipstream.v1.weight_sync_service_pb2 import CommitVersionRequest, OpenEpochRequest
from slipstream.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from slipstream.v1.weights_pb2 import Manifest
from slipstream.weights.manifest import check_run_id
from slipstream.weights.publisher import Publisher
from slipstream_trainer import checkpoint
from slipstream_trainer.batches import Arrived, Inbox, open_consumer
from slipstream_trainer.checkpoint import Checkpoint
from slipstream_trainer.model import AdamW, Policy
from slipstream_trainer.run import Run
from slipstream_trainer.settings import TrainerSettings

_log = logging.getLogger(__name__)
_CALL_S = 60.0


class WeightSync:
    """The calls of weightsync that a trainer makes; they wait while it is away."""

    def __init__(self, target: str, clock: Clock) -> None:
        self._target, self._outage = target, Outage(f"weightsync at {target}", clock)
        self._channel = rpc.make_channel(target)
        self._stub = WeightSyncServiceStub(self._channel)

    async def open_epoch(self, run_id: str) -> int:
        """Takes the run over."""
        request = OpenEpochRequest(run_id=run_id)
        response = await self._patiently(self._stub.OpenEpoch, request)
        return int(response.epoch)

    async def commit(self, manifest: Manifest) -> None:
        """Creates the manifest. Safe to repeat: the very same manifest is no conflict.

        Raises:
            FencedError: the epoch is over. ConflictError: someone else published this version.
        """
        request = CommitVersionRequest(manifest=manifest)
        await self._patiently(self._stub.CommitVersion, request)

    async def _patiently(self, method: Any, request: Any) -> Any:
        return await self._outage.wait_out(
            partial(rpc.call, self._target, method, request, timeout_s=_CALL_S)
        )

    async def close(self) -> None:
        await self._channel.close()


def adamw(config: RunConfig) -> AdamW:
    """Optimizer settings of a run; 0 stands for the default."""
    base = AdamW()
    settings = AdamW(
        config.adam_beta1 or base.beta1,
        config.adam_beta2 or base.beta2,
        config.adam_eps or base.eps,
        config.weight_decay,
    )
    if not (0 < settings.beta1 < 1 and 0 < settings.beta2 < 1 and settings.eps > 0):
        raise ConfigError(f"AdamW needs 0 < beta < 1 and eps > 0, not {settings}")
    if not 0 <= settings.weight_decay < 1:
        raise ConfigError(f"weight_decay must be from 0 to below 1, not {settings.weight_decay}")
    return settings


async def open_run(
    run_id: str,
    config: RunConfig,
    *,
    policy: Policy,
    executor: ThreadPoolExecutor,
    bus: Bus,
    blobs: BlobStore,
    namespace: str,
    clock: Clock,
    settings: TrainerSettings,
    weightsync: WeightSync,
) -> tuple[Run, bytes]:
    """Makes a run ready to train; returns it with the recipe's saved state.

    Raises:
        ConfigError: the run's name or settings make no sense, or its checkpoint is of another model.
        IntegrityError: all of its checkpoints are damaged.
    """
    check_run_id(run_id)
    window = window_size(config.max_lag, config.groups_per_step)
    optimizer = adamw(config)
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(executor, _load, policy, optimizer, settings, run_id)
    state = found.state if found else None
    if state and state.model != str(policy.path):
        _log.warning(
            "run %s began from %s, not from %s: it goes on with its own weights",
            run_id,
            state.model,
            policy.path,
        )
    epoch = await weightsync.open_epoch(run_id)
    step = state.step if state else 0
    # An earlier attempt that died before its first checkpoint has left its groups in the log: they are read.
    offsets = state.offsets if state else {} if epoch > 1 else None
    consumer = await open_consumer(bus, namespace, offsets)
    kept: Window[Arrived] = Window(window, state.head, set(state.consumed)) if state else Window(window)
    shards, kv_cache = settings.delta_shards, config.kv_cache
    publisher = Publisher(blobs, weightsync.commit, run_id, num_shards=shards, kv_cache=kv_cache, clock=clock)
    run = Run(
        run_id=run_id,
        policy=policy,
        executor=executor,
        bus=bus,
        blobs=blobs,
        namespace=namespace,
        clock=clock,
        inbox=Inbox(consumer, bus, blobs, namespace, run_id, config.max_lag, policy.vocab_size, kept, clock),
        publisher=publisher,
        lineage=[*(state.lineage if state else []), Origin(epoch, step)],
        step=step,
        micro_batch_tokens=settings.micro_batch_tokens or (512 if policy.device.type == "cpu" else 8192),
        checkpoint_dir=settings.checkpoint_dir,
        keep_checkpoints=settings.keep_checkpoints,
        records=[GroupRecord.FromString(bytes.fromhex(r)) for r in state.records] if state else [],
    )
    await run.publish_anchor()
    _log.info("run %s: %s at step %d, epoch %d", run_id, "resumed" if state else "new", step, epoch)
    return run, bytes.fromhex(state.recipe_state) if state else b""


def _load(policy: Policy, optimizer: AdamW, settings: TrainerSettings, run_id: str) -> Checkpoint | None:
    found = checkpoint.load_newest(settings.checkpoint_dir, run_id)
    if found is None:
        policy.reset(optimizer)
        return None
    policy.reset(optimizer, found.masters)
    policy.load_optimizer_state(found.state.optimizer_steps, found.moments)
    checkpoint.set_rng_state(found.rng)
    return found
