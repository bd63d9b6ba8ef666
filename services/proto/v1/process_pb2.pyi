from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenUse(_message.Message):
    __slots__ = ("fingerprint", "used_age_ms", "connections")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    USED_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    used_age_ms: int
    connections: int
    def __init__(self, fingerprint: _Optional[str] = ..., used_age_ms: _Optional[int] = ..., connections: _Optional[int] = ...) -> None: ...

class GetTokensResponse(_message.Message):
    __slots__ = ("tokens", "problem", "engine_token")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenUse]
    problem: str
    engine_token: str
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenUse, _Mapping]]] = ..., problem: _Optional[str] = ..., engine_token: _Optional[str] = ...) -> None: ...
