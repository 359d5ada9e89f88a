"""Runs a recipe against services that are up: takes the run, feeds prompts, drives the loop, resumes."""

import asyncio
import contextlib
import getpass
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from slipstream import rpc
from slipstream.blobs import BlobStore, open_store, put_blob
from slipstream.bus import Bus, open_bus
from slipstream.clock import Clock
from slipstream.errors import RetryableError, StoreFullError
from slipstream.recipe.bundle import bundle
from slipstream.recipe.feeder import Feeder, count_published
from slipstream.recipe.loader import Recipe
from slipstream.recipe.run import Listener, Progress, Run, standard_loop
from slipstream.settings import CommonSettings
from slipstream.v1.rollout_pb2 import GrpcReward, PythonReward, RewardSpec
from slipstream.v1.trainer_service_pb2 import OpenRunRequest, OpenRunResponse
from slipstream.v1.trainer_service_pb2_grpc import TrainerServiceStub

_log = logging.getLogger(__name__)

# The first answer comes after the trainer has loaded a checkpoint and published an anchor.
_OPEN_S = 1800.0
_MAX_PAUSE_S = 10.0


@dataclass
class Host:
    """A recipe, its run, and who wants to hear how it goes."""

    recipe: Recipe
    run_id: str
    common: CommonSettings
    clock: Clock
    listener: Listener

    async def run(self) -> Progress:
        """Runs to the last step, going on from the last checkpoint whenever a service was away.

        Raises:
            ConflictError: another loop holds the run.
            StoreFullError: there is no room left, for the last checkpoint say.
            ConfigError: the trainer refuses the settings.
        """
        async with contextlib.AsyncExitStack() as stack:
            blobs = open_store(self.common)
            stack.push_async_callback(blobs.close)
            bus = await stack.enter_async_context(open_bus(self.common))
            pause = 1.0
            while True:
                try:
                    return await self.attempt(bus, await self._rewards(blobs))
                except StoreFullError:
                    raise  # room must be made first; trying again would only repeat the steps before
                except RetryableError as error:
                    _log.warning("%s; going on from the last checkpoint in %.0f s", error, pause)
                await self.clock.sleep(pause)
                pause = min(pause * 2, _MAX_PAUSE_S)

    async def _rewards(self, blobs: BlobStore) -> list[RewardSpec]:
        specs = [
            RewardSpec(name=r.name, weight=r.weight, timeout_s=r.timeout_s, grpc=GrpcReward(target=r.target))
            for r in self.recipe.rewards
        ]
        if self.recipe.reward is not None:
            ref = await put_blob(blobs, bundle(self.recipe.path))
            python = PythonReward(bundle=ref, module=self.recipe.path.stem, function="reward")
            specs.append(
                RewardSpec(
                    name="reward", weight=1.0, timeout_s=self.recipe.settings.reward_timeout_s, python=python
                )
            )
        return specs

    async def attempt(self, bus: Bus, rewards: list[RewardSpec]) -> Progress:
        """Takes the run and goes on with it, once.

        Raises:
            RetryableError: a service was away.
        """
        target = self.common.trainer_target
        async with rpc.make_channel(target) as channel, self._hold(target, channel) as (opened, lost):
            self.listener.opened(opened)
            saved = Progress.from_bytes(opened.recipe_state)
            known = await count_published(bus, self.common.namespace, self.run_id)
            feeder = Feeder(
                bus,
                self.common.namespace,
                self.run_id,
                self.recipe,
                rewards,
                published=max(saved.published, known),
            )
            run = Run(self.run_id, self.recipe.settings, opened, feeder, (target, channel), self.listener)
            loop = self.recipe.loop or standard_loop
            await _first_to_end(loop(run), feeder.run(), lost)
            run.progress.published = feeder.published
            return run.progress

    @contextlib.asynccontextmanager
    async def _hold(
        self, target: str, channel: grpc.aio.Channel
    ) -> AsyncIterator[tuple[OpenRunResponse, "asyncio.Task[None]"]]:
        """Opens the run and holds it for as long as the block lasts."""
        request = OpenRunRequest(
            run_id=self.run_id,
            config=self.recipe.settings.run_config(),
            client=f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}",
        )
        stream = TrainerServiceStub(channel).OpenRun(request)
        try:
            async with asyncio.timeout(_OPEN_S):
                opened = await stream.read()
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(target, error) from None
        except TimeoutError:
            stream.cancel()
            raise RetryableError(
                f"{target}: the trainer did not open the run within {_OPEN_S:.0f} s"
            ) from None
        lost = asyncio.create_task(_until_lost(target, stream))
        try:
            yield opened, lost
        finally:
            stream.cancel()
            lost.cancel()
            with contextlib.suppress(BaseException):
                await lost


async def _until_lost(target: str, stream: Any) -> None:
    """Reads heartbeats; raises when the trainer ends the stream."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        raise rpc.error_of(target, error) from None
    raise RetryableError(f"{target}: the trainer let go of the run")


async def _first_to_end(loop: Any, feeder: Any, lost: "asyncio.Task[None]") -> None:
    """Waits for the loop; a failure of the feeder or the lease ends it."""
    tasks = [asyncio.ensure_future(loop), asyncio.ensure_future(feeder), lost]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
