from slipstream.v1 import rollout_pb2 as _rollout_pb2
from slipstream.v1 import weights_pb2 as _weights_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: _rollout_pb2.PromptGroup
    def __init__(self, prompt: _Optional[_Union[_rollout_pb2.PromptGroup, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("rollout",)
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.RolloutGroup
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.RolloutGroup, _Mapping]] = ...) -> None: ...

class GetReplicaStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetReplicaStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _weights_pb2.ReplicaStatus
    def __init__(self, status: _Optional[_Union[_weights_pb2.ReplicaStatus, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
