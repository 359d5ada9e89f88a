"""The engine in vLLM, embedded. The only file that imports vllm.

`VllmEngine` lives in the service's process, `WeightWorker` inside each of vLLM's worker processes. Weights
go from one to the other through a safetensors file that the workers map.

How weights are replaced depends on the device; the worker decides:

* CPU: vLLM packs linear weights at load and drops the originals, so writing into a parameter has no
  effect. The worker keeps a **twin** of the model. Staging reloads the twin in a background thread by
  vLLM's own loader (names, fusing and packing are its business, for any architecture), the commit
  exchanges the two: milliseconds, however large the model.
* GPU, weights not quantised: CUDA graphs hold the addresses of the weights. The twin stays in pinned host
  memory in the loaded layout, and the commit copies it into the parameters in place.
* Anything else: the commit runs vLLM's `reload_weights`, exact but slow, and says so once.
"""

import asyncio
import contextlib
import copy
import logging
import os
import select
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.sampling_params import RequestOutputKind
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from slipstream.delta.tensors import RawTensor, Weights, load_safetensors, write_safetensors
from slipstream.errors import ConfigError, SlipstreamError
from slipstream_rollout.engine import (
    BASE_LABEL,
    Committed,
    EngineLostError,
    Sampled,
    Sampling,
    Span,
    check_request,
    end_tokens,
)
from slipstream_rollout.layouts import compute_type, narrowed, split, unpacked
from slipstream_rollout.settings import RolloutSettings

_log = logging.getLogger(__name__)


class VllmEngine:
    """See `Engine`."""

    name = "vllm"

    def __init__(self, directory: Path, settings: RolloutSettings) -> None:
        self._directory, self._settings = directory, settings
        self._work_dir = settings.work_dir / settings.replica_id
        self._llm: AsyncLLM | None = None
        self._label = BASE_LABEL
        self._end = end_tokens(directory)

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise SlipstreamError("the vLLM engine is not running")
        return self._llm

    async def start(self) -> None:
        self._work_dir.mkdir(parents=True, exist_ok=True)
        try:
            config = await asyncio.to_thread(self._engine_config)
        except (ValueError, OSError) as error:
            raise ConfigError(f"vLLM cannot run {self._directory}: {error}") from error
        self._vocab_size = config.model_config.get_vocab_size()
        self._llm = await asyncio.to_thread(AsyncLLM.from_vllm_config, config, disable_log_stats=True)
        await self._engine.update_weight_version(BASE_LABEL)
        how = await self._engine.collective_rpc("slipstream_prepare", args=(os.getpid(),))
        if "reload" in how:
            _log.warning("this model's weights are replaced by a full reload: each swap pauses for longer")

    def _engine_config(self) -> Any:
        settings = self._settings
        on_cpu = not torch.cuda.is_available()
        arguments = AsyncEngineArgs(
            model=str(self._directory),
            skip_tokenizer_init=True,
            dtype=compute_type(settings.compute, on_cpu=on_cpu),
            max_model_len=settings.max_model_len,
            max_num_seqs=256,
            enforce_eager=on_cpu,
            use_tqdm_on_load=False,
            tensor_parallel_size=settings.tensor_parallel,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30) if on_cpu else None,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            # vLLM's 128 on a CPU is longer than many a prompt, and only whole blocks are shared in a group.
            block_size=32 if on_cpu else None,
            # After a chunk, vLLM rewinds the generator of a seeded request; torch cannot on a CPU: vLLM dies.
            enable_chunked_prefill=False if on_cpu else None,
            generation_config="auto",
            worker_extension_cls=f"{__name__}.{WeightWorker.__name__}",
            disable_log_stats=True,
        )
        return arguments.create_engine_config()

    async def generate(
        self, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, request_id: str
    ) -> list[Sampled]:
        check_request(
            prompt_token_ids, n, sampling, max_len=self._settings.max_model_len, vocab_size=self._vocab_size
        )
        params = SamplingParams(
            n=1 if sampling.temperature == 0 else n,
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sorted(self._end | set(sampling.stop_token_ids)),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt keeps a version's prefix cache apart from that of every other.
        prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids), cache_salt=self._label or "base")
        outputs: list[Any] = []
        try:
            async for result in self._engine.generate(prompt, params, f"{request_id}#{uuid.uuid4().hex[:8]}"):
                outputs = result.outputs
        except EngineDeadError as error:
            raise SlipstreamError("the vLLM engine died; its own log says why") from error
        lost = [o for o in outputs if o.finish_reason not in ("stop", "length")]
        if lost or not outputs:
            reason = lost[0].finish_reason if lost else "no output"
            raise EngineLostError(
                f"vLLM gave {len(lost) or n} of {n} completions up ({reason})", len(lost) or n
            )
        sampled = [_sampled(output) for output in outputs]
        return sampled * n if sampling.temperature == 0 else sampled

    async def stage(self, weights: Weights, changed: Collection[str]) -> float:
        begun = time.perf_counter()
        path = self._work_dir / "staged.safetensors"
        await asyncio.to_thread(write_safetensors, path, weights)
        await self._engine.collective_rpc("slipstream_stage", args=(str(path),))
        while not all(await self._engine.collective_rpc("slipstream_staged")):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return time.perf_counter() - begun

    async def commit(self, label: str) -> Committed:
        engine = self._engine
        in_flight = engine.get_num_unfinished_requests()
        begun = time.perf_counter()
        try:
            # Not engine.pause_generation: after the same call it sleeps 20 ms, longer than the pause itself.
            await engine.engine_core.pause_scheduler_async(
                mode="keep", clear_cache=self._settings.recompute_kv
            )
            begun = time.perf_counter()  # before, the engine finished the step that it was in
            await engine.update_weight_version("?")  # if the commit fails half-way, no label vouches for it
            await engine.collective_rpc("slipstream_commit")
            await engine.update_weight_version(label)
            self._label = label
        finally:
            await engine.resume_generation()
        return Committed((time.perf_counter() - begun) * 1e3, in_flight)

    async def read_back(self) -> dict[str, RawTensor]:
        path = self._work_dir / "read-back.safetensors"
        await self._engine.collective_rpc("slipstream_read_back", args=(str(path),))
        return await asyncio.to_thread(load_safetensors, path)

    async def close(self) -> None:
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        for file in ("staged.safetensors", "read-back.safetensors"):
            (self._work_dir / file).unlink(missing_ok=True)


def _sampled(output: Any) -> Sampled:
    """Our form of vLLM's CompletionOutput."""
    ids = [int(token) for token in output.token_ids]
    logprobs = [float(at[token].logprob) for token, at in zip(ids, output.logprobs, strict=True)]
    spans = [Span(s.version, s.start, s.end) for s in output.weight_versions]
    return Sampled(ids, logprobs, output.finish_reason == "stop", spans)


class WeightWorker:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by RPC, which runs
    between two engine steps and holds them up while it runs."""

    model_runner: Any
    vllm_config: Any
    rank: int

    def slipstream_prepare(self, service_pid: int) -> str:
        """Makes the twin. Returns how weights will be replaced: `exchange`, `copy` or `reload`.

        Args:
            service_pid: process that the worker must not outlive.
        """
        if hasattr(os, "pidfd_open"):
            threading.Thread(target=_end_with, args=(os.pidfd_open(service_pid),), daemon=True).start()
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        self._slipstream_work: threading.Thread | None = None
        self._slipstream_error: BaseException | None = None
        self._slipstream_path = ""
        model_config = self.vllm_config.model_config
        on_cpu = self.model_runner.device.type == "cpu"
        self._slipstream_how = "exchange" if on_cpu else "reload" if model_config.quantization else "copy"
        if self.vllm_config.lora_config or self.vllm_config.speculative_config:
            self._slipstream_how = "reload"
        if self._slipstream_how != "reload":
            try:
                self._slipstream_make_twin()
            except Exception:
                logging.getLogger(__name__).warning("no twin of this model can be made", exc_info=True)
                self._slipstream_how = "reload"
        return self._slipstream_how

    def _slipstream_make_twin(self) -> None:
        # Attention and MoE layers enter themselves in this table by name; the twin's go into its own.
        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        self._slipstream_layers = config.compilation_config.static_forward_context
        loader, model_config = get_model_loader(config.load_config), config.model_config
        live = self.model_runner.get_model()
        with set_current_vllm_config(config):
            if self._slipstream_how == "exchange":
                twin = loader.load_model(vllm_config=config, model_config=model_config)
            else:
                with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
                    twin = initialize_model(config, model_config=model_config)
                loader.load_weights(twin, model_config)
                _check_layout(twin, live)
                for parameter in twin.parameters():
                    parameter.data = parameter.data.pin_memory()
        _part(twin, live)
        self._slipstream_twin = twin

    def slipstream_stage(self, path: str) -> None:
        """Begins to load the weights in a safetensors file into the twin; returns at once."""
        self._slipstream_path, self._slipstream_error = path, None
        self._slipstream_work = threading.Thread(target=self._slipstream_load, daemon=True)
        self._slipstream_work.start()

    def _slipstream_load(self) -> None:
        try:
            if self._slipstream_how == "exchange":
                initialize_layerwise_reload(self._slipstream_twin)
                self._slipstream_twin.load_weights(_tensors(self._slipstream_path))
                finalize_layerwise_reload(self._slipstream_twin, self.vllm_config.model_config)
                _pack_again(self._slipstream_twin)
            elif self._slipstream_how == "copy":
                self._slipstream_twin.load_weights(_tensors(self._slipstream_path))
        except BaseException as error:
            self._slipstream_error = error

    def slipstream_staged(self) -> bool:
        """Whether staging is done. Raises what made it fail."""
        work = self._slipstream_work
        if work is not None and work.is_alive():
            return False
        if self._slipstream_error is not None:
            raise self._slipstream_error
        return True

    def slipstream_commit(self) -> None:
        """Puts the staged weights to use. Called while the engine is paused."""
        if self._slipstream_work is None or not self.slipstream_staged():
            raise RuntimeError("there is nothing staged to commit, or staging is not done")
        self._slipstream_work = None
        runner = self.model_runner
        if self._slipstream_how == "reload":
            runner.reload_weights(weights_iterator=_tensors(self._slipstream_path))
        elif self._slipstream_how == "copy":
            parameters = dict(runner.get_model().named_parameters())
            for name, parameter in self._slipstream_twin.named_parameters():
                parameters[name].data.copy_(parameter.data, non_blocking=True)
            torch.accelerator.synchronize()
        else:
            runner.model, self._slipstream_twin = self._slipstream_twin, runner.model
            layers = self.vllm_config.compilation_config.static_forward_context
            for name, twin in self._slipstream_layers.items():
                live = layers[name]
                # Layers with a KV cache were given it, and more, when the caches were made.
                given = {k: v for k, v in vars(live).items() if k == "kv_cache" or k not in vars(twin)}
                vars(twin).update(given)
                layers[name], self._slipstream_layers[name] = twin, live

    @torch.inference_mode()
    def slipstream_read_back(self, path: str) -> None:
        """Writes the weights in use to a safetensors file, in the checkpoint's layout.

        Packed linear layers are read by multiplying the identity with them: exact but for the sign of
        zeros. One worker only.
        """
        model = self.model_runner.get_model()
        fused = getattr(model, "packed_modules_mapping", {})
        found: dict[str, torch.Tensor] = {}
        with _shapes(self._slipstream_path) as shapes:
            for name, module in model.named_modules():
                for key, parameter in module.named_parameters(recurse=False):
                    tensor = parameter.data
                    if key == "weight" and hasattr(module, "cpu_linear"):
                        tensor = unpacked(module, tensor)
                    found |= split(f"{name}.{key}", tensor, fused, shapes)
        save_file({name: narrowed(t) for name, t in found.items()}, path)


def _end_with(service: int) -> None:
    """Ends this process when the service's does, however that came; vLLM's other processes follow it.
    Left alone, they would finish what they have and then hold their memory for ever."""
    select.select([service], [], [])
    os._exit(1)


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            yield name, file.get_tensor(name)


def _check_layout(twin: torch.nn.Module, live: torch.nn.Module) -> None:
    """Raises unless parameters in use lie as they were loaded: some layers permute theirs afterwards."""
    ours = dict(live.named_parameters())
    for name, parameter in twin.named_parameters():
        if name not in ours or not torch.equal(ours[name].data.cpu(), parameter.data):
            raise RuntimeError(f"parameter {name} is not in the layout that it is loaded in")


def _part(twin: torch.nn.Module, live: torch.nn.Module) -> None:
    """Gives the twin its own copy of modules that vLLM shares between models (rotary embeddings): a reload
    takes their buffers away for a while."""
    shared = {id(module) for module in live.modules()}
    copies: dict[int, Any] = {}
    for name, module in list(twin.named_modules(remove_duplicate=False)):
        if id(module) in shared:
            if id(module) not in copies:
                copies[id(module)] = copy.deepcopy(module)
                record_metadata_for_reloading(copies[id(module)])
            owner, _, last = name.rpartition(".")
            setattr(twin.get_submodule(owner), last, copies[id(module)])


def _pack_again(model: Any) -> None:
    """A head that is tied to the embedding has a packed form of its own, which a reload leaves as it was."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def _shapes(path: str) -> Iterator[dict[str, list[int]]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        yield {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
