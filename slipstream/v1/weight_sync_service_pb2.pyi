from slipstream.v1 import common_pb2 as _common_pb2
from slipstream.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenEpochRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class OpenEpochResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class CommitVersionRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: _weights_pb2.Manifest
    def __init__(self, manifest: _Optional[_Union[_weights_pb2.Manifest, _Mapping]] = ...) -> None: ...

class CommitVersionResponse(_message.Message):
    __slots__ = ("manifest_key", "already_committed")
    MANIFEST_KEY_FIELD_NUMBER: _ClassVar[int]
    ALREADY_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    manifest_key: str
    already_committed: bool
    def __init__(self, manifest_key: _Optional[str] = ..., already_committed: _Optional[bool] = ...) -> None: ...

class PlanUpdateRequest(_message.Message):
    __slots__ = ("run_id", "have", "target")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    have: _common_pb2.Version
    target: _common_pb2.Version
    def __init__(self, run_id: _Optional[str] = ..., have: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., target: _Optional[_Union[_common_pb2.Version, _Mapping]] = ...) -> None: ...

class PlanUpdateResponse(_message.Message):
    __slots__ = ("manifests", "size_bytes")
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    manifests: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Manifest]
    size_bytes: int
    def __init__(self, manifests: _Optional[_Iterable[_Union[_weights_pb2.Manifest, _Mapping]]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class VersionInfo(_message.Message):
    __slots__ = ("version", "kind", "size_bytes", "pinned", "created_unix_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    kind: _weights_pb2.VersionKind
    size_bytes: int
    pinned: bool
    created_unix_s: float
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., kind: _Optional[_Union[_weights_pb2.VersionKind, str]] = ..., size_bytes: _Optional[int] = ..., pinned: _Optional[bool] = ..., created_unix_s: _Optional[float] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionInfo]
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionInfo, _Mapping]]] = ...) -> None: ...

class PinVersionRequest(_message.Message):
    __slots__ = ("run_id", "version", "pinned")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: _common_pb2.Version
    pinned: bool
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., pinned: _Optional[bool] = ...) -> None: ...

class PinVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchVersionsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class WatchVersionsResponse(_message.Message):
    __slots__ = ("announced",)
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    announced: _weights_pb2.VersionAnnounced
    def __init__(self, announced: _Optional[_Union[_weights_pb2.VersionAnnounced, _Mapping]] = ...) -> None: ...
