"""Rewards in Python: fetches a recipe's bundle and calls its function in the pool."""

import asyncio
from pathlib import Path

from slipstream.blobs import BlobStore, get_blob
from slipstream.errors import IntegrityError, NotFoundError
from slipstream.recipe.bundle import MAX_BUNDLE_BYTES
from slipstream.recipe.call import LoadError
from slipstream.v1.common_pb2 import BlobRef
from slipstream.v1.rollout_pb2 import RewardSpec, RolloutGroup
from slipstream_reward.pool import WorkerPool
from slipstream_reward.process import Function
from slipstream_reward.scoring import Outcome, VoidGroup, completion_fields, prompt_fields, timeout_of
from slipstream_reward.together import together

_FETCH_ATTEMPTS = 3


class LocalScorer:
    """Scores groups by Python functions."""

    def __init__(self, pool: WorkerPool, store: BlobStore, directory: Path) -> None:
        """
        Args:
            directory: where bundles are kept, one file per content hash.
        """
        self._pool, self._store, self._directory = pool, store, directory
        self._fetching = asyncio.Lock()

    async def score(self, spec: RewardSpec, group: RolloutGroup) -> list[Outcome]:
        """One outcome per completion.

        Raises:
            VoidGroup: the function cannot be had.
            RetryableError: the store is away.
        """
        function = Function(await self._fetch(spec.python.bundle), spec.python.module, spec.python.function)
        prompt, completions = prompt_fields(group.prompt), completion_fields(group)
        timeout_s = timeout_of(spec)
        try:
            # One call per completion spreads a group over the pool, and a hang costs that completion alone.
            if await self._pool.kind(function) == "completion":
                calls = [self._pool.score(function, prompt, [each], timeout_s) for each in completions]
                results = [result for call in await together(calls) for result in call]
            else:
                results = await self._pool.score(function, prompt, completions, timeout_s)
        except LoadError as error:
            raise VoidGroup(str(error)) from None
        return [
            Outcome(error=str(r["error"])) if "error" in r else Outcome(float(r["value"]), dict(r["parts"]))
            for r in results
        ]

    async def _fetch(self, ref: BlobRef) -> Path:
        path = self._directory / f"{ref.sha256}.zip"
        async with self._fetching:
            if not path.exists():
                data = await self._download(ref)
                await asyncio.to_thread(_write, path, data)
        return path

    async def _download(self, ref: BlobRef) -> bytes:
        if not ref.sha256.isalnum() or ref.size_bytes > MAX_BUNDLE_BYTES:
            raise VoidGroup(f"the bundle {ref.key!r} of {ref.size_bytes} bytes is not one that can be loaded")
        for attempt in range(1, _FETCH_ATTEMPTS + 1):
            try:
                return await get_blob(self._store, ref)
            except NotFoundError:
                raise VoidGroup(f"the recipe's bundle {ref.key} is not in the store") from None
            except IntegrityError as error:
                if attempt == _FETCH_ATTEMPTS:
                    raise VoidGroup(f"the recipe's bundle is damaged: {error}") from None
        raise AssertionError("unreachable")


def _write(path: Path, data: bytes) -> None:
    half = path.with_suffix(".half")
    half.write_bytes(data)
    half.rename(path)
