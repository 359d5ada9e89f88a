from slipstream.v1 import common_pb2 as _common_pb2
from slipstream.v1 import train_pb2 as _train_pb2
from slipstream.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunConfig(_message.Message):
    __slots__ = ("max_lag", "groups_per_step", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "kv_cache")
    MAX_LAG_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    ADAM_BETA1_FIELD_NUMBER: _ClassVar[int]
    ADAM_BETA2_FIELD_NUMBER: _ClassVar[int]
    ADAM_EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    max_lag: int
    groups_per_step: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    kv_cache: _weights_pb2.KvCachePolicy
    def __init__(self, max_lag: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., adam_beta1: _Optional[float] = ..., adam_beta2: _Optional[float] = ..., adam_eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., kv_cache: _Optional[_Union[_weights_pb2.KvCachePolicy, str]] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id", "config", "client")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config: RunConfig
    client: str
    def __init__(self, run_id: _Optional[str] = ..., config: _Optional[_Union[RunConfig, _Mapping]] = ..., client: _Optional[str] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("session_id", "step", "version", "recipe_state", "num_parameters")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECIPE_STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    version: _common_pb2.Version
    recipe_state: bytes
    num_parameters: int
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., recipe_state: _Optional[bytes] = ..., num_parameters: _Optional[int] = ...) -> None: ...

class NextBatchRequest(_message.Message):
    __slots__ = ("session_id", "num_groups")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    num_groups: int
    def __init__(self, session_id: _Optional[str] = ..., num_groups: _Optional[int] = ...) -> None: ...

class SampleSummary(_message.Message):
    __slots__ = ("sample_id", "scored", "reward", "parts", "num_tokens", "truncated", "error")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    scored: bool
    reward: float
    parts: _containers.ScalarMap[str, float]
    num_tokens: int
    truncated: bool
    error: str
    def __init__(self, sample_id: _Optional[str] = ..., scored: _Optional[bool] = ..., reward: _Optional[float] = ..., parts: _Optional[_Mapping[str, float]] = ..., num_tokens: _Optional[int] = ..., truncated: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class GroupSummary(_message.Message):
    __slots__ = ("record", "samples")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    record: _train_pb2.GroupRecord
    samples: _containers.RepeatedCompositeFieldContainer[SampleSummary]
    def __init__(self, record: _Optional[_Union[_train_pb2.GroupRecord, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleSummary, _Mapping]]] = ...) -> None: ...

class NextBatchResponse(_message.Message):
    __slots__ = ("groups", "wait_s")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupSummary]
    wait_s: float
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupSummary, _Mapping]]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class SampleAdvantage(_message.Message):
    __slots__ = ("sample_id", "advantage")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    advantage: float
    def __init__(self, sample_id: _Optional[str] = ..., advantage: _Optional[float] = ...) -> None: ...

class LossConfig(_message.Message):
    __slots__ = ("name", "params")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    params: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., params: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("session_id", "samples", "loss")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    samples: _containers.RepeatedCompositeFieldContainer[SampleAdvantage]
    loss: LossConfig
    def __init__(self, session_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SampleAdvantage, _Mapping]]] = ..., loss: _Optional[_Union[LossConfig, _Mapping]] = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("session_id", "step", "learning_rate", "max_grad_norm")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    learning_rate: float
    max_grad_norm: float
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., learning_rate: _Optional[float] = ..., max_grad_norm: _Optional[float] = ...) -> None: ...

class OptimStepResponse(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("session_id", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, session_id: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("version", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("session_id", "recipe_state")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RECIPE_STATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    recipe_state: bytes
    def __init__(self, session_id: _Optional[str] = ..., recipe_state: _Optional[bytes] = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class GetTrainerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrainerStatusResponse(_message.Message):
    __slots__ = ("run_id", "client", "step", "version", "model", "phase")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    client: str
    step: int
    version: _common_pb2.Version
    model: str
    phase: str
    def __init__(self, run_id: _Optional[str] = ..., client: _Optional[str] = ..., step: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., model: _Optional[str] = ..., phase: _Optional[str] = ...) -> None: ...
