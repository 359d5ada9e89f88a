"""The policy being trained: fp32 masters, a module that computes with their bf16 rounding, AdamW.

The module's weights are at all times bit for bit those that are published, so trainer and engine never hold
different ones. Gradients are added up in fp32 on the masters, tensor by tensor, with no gather of the model.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.delta.tensors import RawTensor, load_checkpoint
from slipstream.errors import ConfigError, SlipstreamError
from slipstream_trainer.logprobs import token_logprobs
from slipstream_trainer.packing import Row


@dataclass(frozen=True)
class AdamW:
    """Settings of the optimizer."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Forward:
    """What the model says about a row's T sampled tokens."""

    logp: Tensor
    """[T] log-probabilities at the row's temperature, with gradient."""
    entropy: Tensor
    """[T] entropy of the distributions they were drawn from, in nats, without gradient."""


class Policy:
    """A causal language model and its optimizer. Not thread safe: use it from one thread."""

    def __init__(self, model: str, *, device: str = "auto", compute: str = "auto") -> None:
        from transformers import AutoModelForCausalLM

        self.path = find_model(model)
        self.device = torch.device(_device(device))
        self.compute = _compute_type(compute, self.device)
        self._module = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
        # No dropout: the engine that sampled had none. Gradients flow all the same.
        self._module.to(self.device, self.compute).eval()
        self._params: dict[str, Tensor] = dict(self._module.named_parameters())
        _check_names(self.path, self._module, set(self._params))
        self.masters: dict[str, Tensor] = {
            name: p.detach().float().clone() for name, p in self._params.items()
        }
        self.vocab_size = int(self._module.get_output_embeddings().weight.shape[0])
        self._optimizer = self._new_optimizer(AdamW())

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once."""
        return sum(p.numel() for p in self.masters.values())

    def reset(self, settings: AdamW, masters: Mapping[str, Tensor] | None = None) -> None:
        """Starts anew from given masters, by default those of the base model, with a fresh optimizer."""
        if masters is None:
            masters = {name: _to_tensor(raw) for name, raw in load_checkpoint(self.path).items()}
        with torch.no_grad():
            for name, master in self.masters.items():
                if name not in masters or masters[name].shape != master.shape:
                    raise ConfigError(
                        f"these weights are not for this model: {name} is missing or of another shape"
                    )
                master.copy_(masters[name])
        self.clear_gradients()
        self._round()
        self._optimizer = self._new_optimizer(settings)

    def _new_optimizer(self, settings: AdamW) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.masters.values(),
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def forward(self, row: Row) -> Forward:
        """Log-probabilities of a row's sampled tokens; only the R predicting places get logits."""
        logits = self._module(
            input_ids=self._put(row.tokens)[None],
            attention_mask=self._put(row.mask())[None, None],
            position_ids=self._put(row.positions)[None],
            use_cache=False,
            logits_to_keep=self._put(row.predictors),
        ).logits[0]
        predictor, target = self._put(row.predictor), self._put(row.target)
        return Forward(*token_logprobs(logits, row.temperature, predictor, target))

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradient to the masters'."""
        loss.backward()  # type: ignore[no-untyped-call]
        for name, p in self._params.items():
            if p.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.add_(p.grad)
            p.grad = None

    def clear_gradients(self) -> None:
        """Forgets what has been added up."""
        for tensor in (*self._params.values(), *self.masters.values()):
            tensor.grad = None

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        """Clips, steps, rounds, clears; returns the gradient's norm before clipping.

        Without any gradient the weights and the optimizer stay as they are and the norm is 0.

        Raises:
            SlipstreamError: the norm is not finite. Weights and optimizer are untouched, gradients are gone.
        """
        masters = [m for m in self.masters.values() if m.grad is not None]
        if not masters:
            return 0.0
        norm = float(torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None]))
        if not math.isfinite(norm):
            self.clear_gradients()
            raise SlipstreamError(
                f"the gradient's norm is {norm}: the step is refused, the gradients are discarded, weights "
                "and optimizer are as before. Look at the advantages, or lower the learning rate"
            )
        if max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(
                masters, max_grad_norm, torch.tensor(norm, device=self.device)
            )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.clear_gradients()
        self._round()
        return norm

    def weights(self) -> dict[str, RawTensor]:
        """A copy in host memory of the bf16 weights, under the names of the checkpoint."""
        return {name: _to_raw(p) for name, p in self._params.items()}

    def optimizer_state(self) -> tuple[int, dict[str, Tensor]]:
        """(steps made, moments under `m/<name>` and `v/<name>`); no moments before the first step."""
        steps, moments = 0, {}
        for name, master in self.masters.items():
            if state := self._optimizer.state.get(master):
                steps = int(state["step"])
                moments[f"m/{name}"], moments[f"v/{name}"] = state["exp_avg"], state["exp_avg_sq"]
        return steps, moments

    def load_optimizer_state(self, steps: int, moments: Mapping[str, Tensor]) -> None:
        """Puts back what `optimizer_state` gave."""
        for name, master in self.masters.items():
            if f"m/{name}" not in moments:
                continue
            self._optimizer.state[master] = {
                "step": torch.tensor(float(steps), device=self.device),
                "exp_avg": moments[f"m/{name}"].to(self.device, copy=True),
                "exp_avg_sq": moments[f"v/{name}"].to(self.device, copy=True),
            }

    def _round(self) -> None:
        with torch.no_grad():
            for name, p in self._params.items():
                p.copy_(self.masters[name].bfloat16())

    def _put(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
        return torch.from_numpy(array).to(self.device)


def find_model(model: str) -> Path:
    """Directory of a model given by its directory or, as `owner/name`, from the hub. May download.

    Raises:
        ConfigError: there is no such model, or no network to fetch it.
    """
    path = Path(model)
    if (path / "config.json").is_file():
        return path
    said = f"no model at {path.absolute()}: it must be a Hugging Face directory with a config.json"
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise ConfigError(said)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
            )
        )
    except Exception as error:
        raise ConfigError(f"{said}. The hub did not give {model} either: {error}") from None


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _compute_type(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fast = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        # Without bf16 instructions float32 is several times faster, and no less exact.
        fast = fast and (device.type != "cpu" or torch.cpu._is_avx512_bf16_supported())
        name = "bfloat16" if fast else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _check_names(path: Path, module: torch.nn.Module, exported: set[str]) -> None:
    """What is published must be what the checkpoint holds: engines load by these names."""
    stored = set(load_checkpoint(path))
    aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)} - exported
    missing, unknown = sorted(stored - exported - aliases), sorted(exported - stored)
    if missing or unknown:
        raise ConfigError(
            f"the weights of {path} and of its model class differ: only in the files "
            f"{missing[:3] or 'none'}, only in the class {unknown[:3] or 'none'}; "
            "such a model cannot be published"
        )


def _to_raw(p: Tensor) -> RawTensor:
    host = p.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
    return RawTensor("BF16", tuple(p.shape), host.view(torch.uint8).reshape(-1).numpy())


def _to_tensor(raw: RawTensor) -> Tensor:
    types: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    if raw.dtype not in types:
        raise ConfigError(f"weights of type {raw.dtype} cannot be trained; known are {', '.join(types)}")
    return torch.from_numpy(raw.data.copy()).view(types[raw.dtype]).reshape(raw.shape)
