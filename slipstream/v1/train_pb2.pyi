from slipstream.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_OUTCOME_UNSPECIFIED: _ClassVar[GroupOutcome]
    GROUP_OUTCOME_TRAINED: _ClassVar[GroupOutcome]
    GROUP_OUTCOME_VOID: _ClassVar[GroupOutcome]
    GROUP_OUTCOME_DROPPED: _ClassVar[GroupOutcome]

class GateState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GATE_STATE_UNSPECIFIED: _ClassVar[GateState]
    GATE_STATE_OK: _ClassVar[GateState]
    GATE_STATE_WARN: _ClassVar[GateState]
    GATE_STATE_TIGHTEN: _ClassVar[GateState]
    GATE_STATE_HOLD: _ClassVar[GateState]
GROUP_OUTCOME_UNSPECIFIED: GroupOutcome
GROUP_OUTCOME_TRAINED: GroupOutcome
GROUP_OUTCOME_VOID: GroupOutcome
GROUP_OUTCOME_DROPPED: GroupOutcome
GATE_STATE_UNSPECIFIED: GateState
GATE_STATE_OK: GateState
GATE_STATE_WARN: GateState
GATE_STATE_TIGHTEN: GateState
GATE_STATE_HOLD: GateState

class GroupRecord(_message.Message):
    __slots__ = ("group_id", "sequence", "outcome", "reason", "lag", "mean_reward", "num_tokens")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sequence: int
    outcome: GroupOutcome
    reason: str
    lag: int
    mean_reward: float
    num_tokens: int
    def __init__(self, group_id: _Optional[str] = ..., sequence: _Optional[int] = ..., outcome: _Optional[_Union[GroupOutcome, str]] = ..., reason: _Optional[str] = ..., lag: _Optional[int] = ..., mean_reward: _Optional[float] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("run_id", "step", "version", "groups", "offsets", "metrics")
    class OffsetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    version: _common_pb2.Version
    groups: _containers.RepeatedCompositeFieldContainer[GroupRecord]
    offsets: _containers.ScalarMap[int, int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupRecord, _Mapping]]] = ..., offsets: _Optional[_Mapping[int, int]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LagStats(_message.Message):
    __slots__ = ("lag", "num_tokens", "k1", "k3", "max_abs_dp", "ess", "clipped")
    LAG_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    K1_FIELD_NUMBER: _ClassVar[int]
    K3_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_DP_FIELD_NUMBER: _ClassVar[int]
    ESS_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    lag: int
    num_tokens: int
    k1: float
    k3: float
    max_abs_dp: float
    ess: float
    clipped: float
    def __init__(self, lag: _Optional[int] = ..., num_tokens: _Optional[int] = ..., k1: _Optional[float] = ..., k3: _Optional[float] = ..., max_abs_dp: _Optional[float] = ..., ess: _Optional[float] = ..., clipped: _Optional[float] = ...) -> None: ...

class AlignmentRecord(_message.Message):
    __slots__ = ("run_id", "step", "version", "group_id", "replica_id", "by_lag")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    BY_LAG_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    version: _common_pb2.Version
    group_id: str
    replica_id: str
    by_lag: _containers.RepeatedCompositeFieldContainer[LagStats]
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., group_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., by_lag: _Optional[_Iterable[_Union[LagStats, _Mapping]]] = ...) -> None: ...

class Alert(_message.Message):
    __slots__ = ("run_id", "state", "reason", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: GateState
    reason: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[GateState, str]] = ..., reason: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...
