"""The delta codec: the lossless difference between two sets of weights. Pure functions on bytes."""

from slipstream.delta.container import (
    DeltaInfo,
    TensorSetError,
    TensorTypeError,
    apply_delta,
    encode_delta,
    read_info,
)
from slipstream.delta.tensors import (
    RawTensor,
    Weights,
    digest,
    load_checkpoint,
    load_safetensors,
    parse_safetensors,
    safetensors_bytes,
    write_safetensors,
)

__all__ = [
    "DeltaInfo",
    "RawTensor",
    "TensorSetError",
    "TensorTypeError",
    "Weights",
    "apply_delta",
    "digest",
    "encode_delta",
    "load_checkpoint",
    "load_safetensors",
    "parse_safetensors",
    "read_info",
    "safetensors_bytes",
    "write_safetensors",
]
