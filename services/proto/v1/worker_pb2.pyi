from mooncache.proto.v1 import conductor_pb2 as _conductor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetWorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerStatusResponse(_message.Message):
    __slots__ = ("instance", "load", "engine_pid", "engine_starts", "doing", "events_seen", "events_lost", "events_replayed")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STARTS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    EVENTS_SEEN_FIELD_NUMBER: _ClassVar[int]
    EVENTS_LOST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    instance: _conductor_pb2.Instance
    load: _conductor_pb2.InstanceLoad
    engine_pid: int
    engine_starts: int
    doing: str
    events_seen: int
    events_lost: int
    events_replayed: int
    def __init__(self, instance: _Optional[_Union[_conductor_pb2.Instance, _Mapping]] = ..., load: _Optional[_Union[_conductor_pb2.InstanceLoad, _Mapping]] = ..., engine_pid: _Optional[int] = ..., engine_starts: _Optional[int] = ..., doing: _Optional[str] = ..., events_seen: _Optional[int] = ..., events_lost: _Optional[int] = ..., events_replayed: _Optional[int] = ...) -> None: ...
