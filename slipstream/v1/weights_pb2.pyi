from slipstream.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_KIND_UNSPECIFIED: _ClassVar[VersionKind]
    VERSION_KIND_ANCHOR: _ClassVar[VersionKind]
    VERSION_KIND_DELTA: _ClassVar[VersionKind]

class KvCachePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_CACHE_POLICY_UNSPECIFIED: _ClassVar[KvCachePolicy]
    KV_CACHE_POLICY_KEEP: _ClassVar[KvCachePolicy]
    KV_CACHE_POLICY_RECOMPUTE: _ClassVar[KvCachePolicy]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_FAILED: _ClassVar[ReplicaState]
    REPLICA_STATE_FENCED: _ClassVar[ReplicaState]
VERSION_KIND_UNSPECIFIED: VersionKind
VERSION_KIND_ANCHOR: VersionKind
VERSION_KIND_DELTA: VersionKind
KV_CACHE_POLICY_UNSPECIFIED: KvCachePolicy
KV_CACHE_POLICY_KEEP: KvCachePolicy
KV_CACHE_POLICY_RECOMPUTE: KvCachePolicy
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_FAILED: ReplicaState
REPLICA_STATE_FENCED: ReplicaState

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "codec", "digest_before", "digest_after")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_AFTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    digest_before: str
    digest_after: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., digest_before: _Optional[str] = ..., digest_after: _Optional[str] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("blob", "tensors")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    blob: _common_pb2.BlobRef
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    def __init__(self, blob: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("format", "run_id", "version", "kind", "parent", "shards", "full_size_bytes", "created_unix_s", "canaries", "kv_cache")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    FULL_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CANARIES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    format: int
    run_id: str
    version: _common_pb2.Version
    kind: VersionKind
    parent: _common_pb2.Version
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    full_size_bytes: int
    created_unix_s: float
    canaries: _containers.RepeatedCompositeFieldContainer[Canary]
    kv_cache: KvCachePolicy
    def __init__(self, format: _Optional[int] = ..., run_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., kind: _Optional[_Union[VersionKind, str]] = ..., parent: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., full_size_bytes: _Optional[int] = ..., created_unix_s: _Optional[float] = ..., canaries: _Optional[_Iterable[_Union[Canary, _Mapping]]] = ..., kv_cache: _Optional[_Union[KvCachePolicy, str]] = ...) -> None: ...

class VersionAnnounced(_message.Message):
    __slots__ = ("run_id", "version", "manifest_key", "kind", "size_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: _common_pb2.Version
    manifest_key: str
    kind: VersionKind
    size_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., manifest_key: _Optional[str] = ..., kind: _Optional[_Union[VersionKind, str]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class SwapReport(_message.Message):
    __slots__ = ("version", "fetched_bytes", "fetch_s", "decode_s", "stage_s", "pause_ms", "requests_in_flight", "manifest_s", "verify_s", "canary_gap")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    STAGE_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    CANARY_GAP_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    fetched_bytes: int
    fetch_s: float
    decode_s: float
    stage_s: float
    pause_ms: float
    requests_in_flight: int
    manifest_s: float
    verify_s: float
    canary_gap: float
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., fetched_bytes: _Optional[int] = ..., fetch_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., stage_s: _Optional[float] = ..., pause_ms: _Optional[float] = ..., requests_in_flight: _Optional[int] = ..., manifest_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., canary_gap: _Optional[float] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica_id", "run_id", "version", "state", "detail", "groups_running", "groups_done", "tokens_generated", "requests_lost", "busy_s", "uptime_s", "swap", "engine")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LOST_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    run_id: str
    version: _common_pb2.Version
    state: ReplicaState
    detail: str
    groups_running: int
    groups_done: int
    tokens_generated: int
    requests_lost: int
    busy_s: float
    uptime_s: float
    swap: SwapReport
    engine: str
    def __init__(self, replica_id: _Optional[str] = ..., run_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., detail: _Optional[str] = ..., groups_running: _Optional[int] = ..., groups_done: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., requests_lost: _Optional[int] = ..., busy_s: _Optional[float] = ..., uptime_s: _Optional[float] = ..., swap: _Optional[_Union[SwapReport, _Mapping]] = ..., engine: _Optional[str] = ...) -> None: ...
