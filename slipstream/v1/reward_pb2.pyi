from slipstream.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORE_STATUS_UNSPECIFIED: _ClassVar[ScoreStatus]
    SCORE_STATUS_OK: _ClassVar[ScoreStatus]
    SCORE_STATUS_ERROR: _ClassVar[ScoreStatus]
SCORE_STATUS_UNSPECIFIED: ScoreStatus
SCORE_STATUS_OK: ScoreStatus
SCORE_STATUS_ERROR: ScoreStatus

class Score(_message.Message):
    __slots__ = ("status", "value", "parts", "error")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    status: ScoreStatus
    value: float
    parts: _containers.ScalarMap[str, float]
    error: str
    def __init__(self, status: _Optional[_Union[ScoreStatus, str]] = ..., value: _Optional[float] = ..., parts: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ...) -> None: ...

class ScoredGroup(_message.Message):
    __slots__ = ("rollout", "scores", "void_reason", "duration_s")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    VOID_REASON_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.RolloutGroup
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    void_reason: str
    duration_s: float
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.RolloutGroup, _Mapping]] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., void_reason: _Optional[str] = ..., duration_s: _Optional[float] = ...) -> None: ...
