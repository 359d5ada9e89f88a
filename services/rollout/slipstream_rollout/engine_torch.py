"""The engine in plain transformers: slow and simple, exact, the reference that vLLM is held against.

One thread owns the model. It samples one group at a time, all its completions in one batch, and takes
new weights between two decode steps.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from slipstream.delta.tensors import RawTensor, Weights
from slipstream.errors import ConfigError
from slipstream_rollout.engine import (
    BASE_LABEL,
    Committed,
    EngineLostError,
    Sampled,
    Sampling,
    Span,
    add_token,
    check_request,
    end_tokens,
)
from slipstream_rollout.layouts import compute_type, narrowed

T = TypeVar("T")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def to_torch(raw: RawTensor) -> torch.Tensor:
    """An own copy of a tensor's bytes as a torch tensor."""
    if raw.dtype not in DTYPES:
        raise ConfigError(f"dtype {raw.dtype} is not one that torch knows")
    return torch.from_numpy(raw.data.copy()).view(DTYPES[raw.dtype]).reshape(raw.shape)


def to_raw(tensor: torch.Tensor) -> RawTensor:
    """A copy of a torch tensor's bytes."""
    name = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return RawTensor(name, tuple(tensor.shape), flat.numpy().copy())


class TorchEngine:
    """See `Engine`."""

    name = "torch"

    def __init__(self, directory: Path, *, max_model_len: int, compute: str = "auto") -> None:
        """
        Args:
            compute: type to compute in, as the trainer does: `bfloat16`, `float32`, or `auto`.
        """
        self._directory, self._compute = directory, compute_type(compute, on_cpu=True)
        self._max_len = max_model_len
        self._thread = ThreadPoolExecutor(1, "torch-engine")
        self._lock = threading.Lock()
        self._pending: list[tuple[str, dict[str, torch.Tensor], Future[Committed]]] = []
        self._staged: dict[str, torch.Tensor] = {}
        self._label = BASE_LABEL
        self.in_flight = 0
        self._closing = False

    async def start(self) -> None:
        await self._run(self._load)

    async def generate(
        self, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, request_id: str
    ) -> list[Sampled]:
        check_request(prompt_token_ids, n, sampling, max_len=self._max_len, vocab_size=self._vocab_size)
        return await self._run(lambda: self._generate(list(prompt_token_ids), n, sampling))

    async def stage(self, weights: Weights, changed: Collection[str]) -> float:
        return await asyncio.to_thread(self._stage, weights, changed)

    async def commit(self, label: str) -> Committed:
        done: Future[Committed] = Future()
        with self._lock:
            self._pending.append((label, self._staged, done))
            self._staged = {}
        await self._run(self._take_commits)  # at once when idle; a running group takes it at its next step
        return await asyncio.wrap_future(done)

    async def read_back(self) -> dict[str, RawTensor]:
        return await asyncio.to_thread(
            lambda: {n: to_raw(narrowed(t, self._stored[n])) for n, t in self._parameters.items()}
        )

    async def close(self) -> None:
        self._closing = True
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(str(self._directory), dtype="auto")
        except (OSError, ValueError) as error:
            raise ConfigError(f"transformers cannot load {self._directory}: {error}") from error
        self._model: Any = model.eval().requires_grad_(False)
        self._vocab_size = int(model.config.vocab_size)
        self._end = end_tokens(self._directory)
        # With duplicates: of two tied tensors a checkpoint may name either.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._stored = {name: parameter.dtype for name, parameter in self._parameters.items()}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._compute)

    def _stage(self, weights: Weights, changed: Collection[str]) -> float:
        begun = time.perf_counter()
        staged = dict(self._staged)
        for name in changed:
            tensor, parameter = to_torch(weights[name]), self._parameters.get(name)
            if parameter is None:
                raise ConfigError(f"the model has no tensor {name}; is this a version of another model?")
            if tensor.shape != parameter.shape or tensor.dtype != self._stored[name]:
                raise ConfigError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the model's is {self._stored[name]} "
                    f"{tuple(parameter.shape)}"
                )
            staged[name] = tensor.to(self._compute)
        self._staged = staged
        return time.perf_counter() - begun

    def _take_commits(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for label, staged, done in pending:
            if not done.set_running_or_notify_cancel():
                continue
            begun = time.perf_counter()
            for name, tensor in staged.items():
                self._parameters[name].data = tensor
            self._label = label
            done.set_result(Committed((time.perf_counter() - begun) * 1e3, self.in_flight))

    @torch.inference_mode()
    def _generate(self, prompt: list[int], n: int, sampling: Sampling) -> list[Sampled]:
        stop = self._end | frozenset(sampling.stop_token_ids)
        draws = [_Draw(sampling, i) for i in range(n)]
        tokens: list[list[int]] = [[] for _ in range(n)]
        logprobs: list[list[float]] = [[] for _ in range(n)]
        spans: list[list[Span]] = [[] for _ in range(n)]
        alive = list(range(n))
        cache: Any = None
        inputs = torch.tensor([prompt])
        try:
            for position in range(sampling.max_tokens):
                self.in_flight = len(alive)
                self._take_commits()
                if self._closing:
                    raise EngineLostError("the engine was closed", len(alive))
                out = self._model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, logits = out.past_key_values, out.logits[:, -1].float()
                if position == 0:  # the prompt is computed once for the whole group
                    cache.batch_repeat_interleave(n)
                    logits = logits.repeat(n, 1)
                table = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
                for row, i in enumerate(alive):
                    token = draws[i](table[row])
                    tokens[i].append(token)
                    logprobs[i].append(float(table[row, token]))
                    add_token(spans[i], self._label, position)
                rows = [row for row, i in enumerate(alive) if tokens[i][-1] not in stop]
                if len(rows) < len(alive):
                    alive = [alive[row] for row in rows]
                    if not alive:
                        break
                    cache.batch_select_indices(torch.tensor(rows))
                inputs = torch.tensor([[tokens[i][-1]] for i in alive])
        finally:
            self.in_flight = 0
        return [Sampled(tokens[i], logprobs[i], tokens[i][-1] in stop, spans[i]) for i in range(n)]


class _Draw:
    """Draws tokens of one completion, the same ones for the same seed."""

    def __init__(self, sampling: Sampling, index: int) -> None:
        self._greedy = sampling.temperature == 0
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed + index)

    def __call__(self, logprobs: torch.Tensor) -> int:
        if self._greedy:
            return int(logprobs.argmax())
        return int(torch.multinomial(logprobs.exp(), 1, generator=self._random))
