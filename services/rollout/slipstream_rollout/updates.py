"""Keeps the engine at the newest version of the run that it serves.

Truth is what weightsync plans; announcements only say when to ask. Fetching, checking, decoding and
staging go on while the engine samples; only the commit stops it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from slipstream import topics
from slipstream.bus import Bus
from slipstream.bus.events import parse
from slipstream.clock import Clock
from slipstream.errors import (
    ConfigError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    PoisonMessageError,
    RetryableError,
)
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import SwapReport
from slipstream.weights.manifest import order, version_str
from slipstream.weights.puller import Pulled, Puller
from slipstream_rollout.engine import Engine
from slipstream_rollout.sampler import make_label

_log = logging.getLogger(__name__)

Report = Callable[[SwapReport], Awaitable[None]]


class Updates:
    """The engine's weights: which run, which version, and the way to newer ones."""

    def __init__(
        self,
        engine: Engine,
        puller: Puller,
        clock: Clock,
        report: Report,
        *,
        poll_s: float,
        version_wait_s: float,
    ) -> None:
        self._engine, self._puller, self._clock, self._report = engine, puller, clock, report
        self._poll_s, self._version_wait_s = poll_s, version_wait_s
        self._lock = asyncio.Lock()
        self._hint = asyncio.Event()
        self._staged_all = False
        self._given_up: set[str] = set()
        self.run_id = ""
        """Run whose weights the engine holds; empty for the base model."""
        self.version: Version | None = None
        self.trouble = ""
        """Why the last attempt to update failed; empty when it did not."""

    async def ensure(self, run_id: str, min_version: Version | None = None) -> None:
        """Returns when the engine holds a version of the run, and none before `min_version`. The caller
        sees to it that no other run's groups are being sampled.

        Raises:
            NotFoundError: no such version of the run turned up in time.
        """
        # Once is enough: a dead run's prompts must not hold up the living one by one.
        patience = 0.0 if run_id in self._given_up else self._version_wait_s
        deadline = self._clock.monotonic() + patience
        while not self._holds(run_id, min_version):
            try:
                if await self._update(run_id):
                    continue
            except NotFoundError:
                pass
            except (RetryableError, IntegrityError) as error:
                self._complain(run_id, error)
                # Servers that are away are waited for; what is damaged must not hold up other runs for ever.
                if isinstance(error, IntegrityError) and self._clock.monotonic() >= deadline:
                    self._given_up.add(run_id)
                    raise NotFoundError(f"run {run_id} has no usable version: {error}") from None
                await self._wait(1.0)
                continue
            wanted = "version" if min_version is None else f"version {version_str(min_version)}"
            self.trouble = f"waiting for a {wanted} of run {run_id}"
            if self._clock.monotonic() >= deadline:
                self._given_up.add(run_id)
                raise NotFoundError(
                    f"run {run_id} has no {wanted} after {self._version_wait_s:.0f} s; is its trainer up?"
                )
            await self._wait(0.5)
        self._given_up.discard(run_id)

    def _holds(self, run_id: str, min_version: Version | None) -> bool:
        if self.run_id != run_id or self.version is None:
            return False
        return min_version is None or order(self.version) >= order(min_version)

    async def run(self) -> None:
        """Follows the run held until cancelled."""
        while True:
            await self._wait(self._poll_s)
            if self.run_id:
                await self._try_update()

    async def listen(self, bus: Bus, namespace: str) -> None:
        """Turns announcements into hints until cancelled."""
        consumer = await bus.assign([topics.VERSIONS.full_name(namespace)], offsets="latest")
        while True:
            for record in await consumer.poll():
                try:
                    announced = await parse(record, topics.VERSIONS)
                except PoisonMessageError as error:
                    _log.warning("an announcement cannot be read: %s", error)
                    continue
                if not self.run_id or announced.run_id == self.run_id:
                    self._hint.set()

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hint.wait(), seconds)
        self._hint.clear()

    async def _try_update(self) -> None:
        try:
            await self._update(None)
        except (RetryableError, IntegrityError, NotFoundError, ConfigError) as error:
            self._complain(self.run_id, error)

    def _is_behind(self, pulled: Pulled) -> bool:
        """Versions of a run never go back, whatever the plan says."""
        held = self.version
        if pulled.run_id != self.run_id or held is None or order(pulled.version) > order(held):
            return False
        self._complain(
            pulled.run_id, ConflictError(f"{version_str(pulled.version)} is not after {version_str(held)}")
        )
        return True

    def _complain(self, run_id: str, error: Exception) -> None:
        if str(error) != self.trouble:
            _log.warning("no new weights for run %s: %s", run_id, error)
        self.trouble = str(error)

    async def _update(self, to_run: str | None) -> bool:
        """Goes to the newest version of a run; None for the run held when it is this call's turn. False
        when it is held already."""
        async with self._lock:
            run_id = self.run_id if to_run is None else to_run
            pulled = await self._puller.pull(run_id)
            self.trouble = ""
            if pulled is None or self._is_behind(pulled):
                return False
            changed = pulled.changed if self._staged_all else list(pulled.weights)
            self._staged_all = False  # until the commit went well, nobody knows what is staged
            stage_s = await self._engine.stage(pulled.weights, changed)
            done = await self._engine.commit(make_label(run_id, pulled.version))
            self._staged_all = True
            self._puller.accept(pulled)
            self.run_id, self.version = run_id, pulled.version
        _log.info(
            "now at %s of %s: %d bytes fetched in %.2f s, paused %.1f ms with %d completions in flight",
            version_str(pulled.version),
            run_id,
            pulled.fetched_bytes,
            pulled.fetch_s,
            done.pause_ms,
            done.in_flight,
        )
        await self._report(
            SwapReport(
                version=pulled.version,
                fetched_bytes=pulled.fetched_bytes,
                fetch_s=pulled.fetch_s,
                decode_s=pulled.decode_s,
                stage_s=stage_s,
                pause_ms=done.pause_ms,
                requests_in_flight=done.in_flight,
            )
        )
        return True
