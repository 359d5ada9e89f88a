from slipstream.v1 import train_pb2 as _train_pb2
from slipstream.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRunStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class TopicStatus(_message.Message):
    __slots__ = ("topic", "messages", "behind")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    topic: str
    messages: int
    behind: int
    def __init__(self, topic: _Optional[str] = ..., messages: _Optional[int] = ..., behind: _Optional[int] = ...) -> None: ...

class GetRunStatusResponse(_message.Message):
    __slots__ = ("run_id", "last_step", "replicas", "topics", "gate", "runs")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    last_step: _train_pb2.StepRecord
    replicas: _containers.RepeatedCompositeFieldContainer[_weights_pb2.ReplicaStatus]
    topics: _containers.RepeatedCompositeFieldContainer[TopicStatus]
    gate: _train_pb2.GateState
    runs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., last_step: _Optional[_Union[_train_pb2.StepRecord, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[_weights_pb2.ReplicaStatus, _Mapping]]] = ..., topics: _Optional[_Iterable[_Union[TopicStatus, _Mapping]]] = ..., gate: _Optional[_Union[_train_pb2.GateState, str]] = ..., runs: _Optional[_Iterable[str]] = ...) -> None: ...

class GetAlignmentRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class StepAlignment(_message.Message):
    __slots__ = ("step", "by_lag")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BY_LAG_FIELD_NUMBER: _ClassVar[int]
    step: int
    by_lag: _containers.RepeatedCompositeFieldContainer[_train_pb2.LagStats]
    def __init__(self, step: _Optional[int] = ..., by_lag: _Optional[_Iterable[_Union[_train_pb2.LagStats, _Mapping]]] = ...) -> None: ...

class GetAlignmentResponse(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepAlignment]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepAlignment, _Mapping]]] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: _train_pb2.StepRecord
    def __init__(self, step: _Optional[_Union[_train_pb2.StepRecord, _Mapping]] = ...) -> None: ...
