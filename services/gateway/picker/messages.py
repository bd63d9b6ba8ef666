"""Messages of Envoy's external processing, made and read: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from google.protobuf import struct_pb2

from mooncache.gateway.picker.endpoints import subset_of
from mooncache.proto.envoy import ext_proc_pb2 as pb

DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
MODEL_REWRITE: Final = "x-gateway-model-name-rewrite"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_NAMESPACE: Final = "envoy.lb"
PIECE_BYTES: Final = 256 << 10
"""Of a body on its way back: Envoy passes a piece on when it has all of it."""
_REPLACE: Final = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers_of(message: pb.HttpHeaders) -> list[tuple[bytes, bytes]]:
    """Names in lower case, and values, pseudo headers included."""
    return [
        (header.key.lower().encode("latin-1", "replace"), header.raw_value or header.value.encode())
        for header in message.headers.headers
    ]


def unsuitable(message: pb.ProcessingRequest) -> str:
    """Why the filter's configuration cannot work, "" when it can or does not say."""
    if message.observability_mode:
        return "it is in observability_mode, in which no answer counts"
    if not message.HasField("protocol_config"):
        return ""
    config = message.protocol_config
    modes = {"request_body_mode": config.request_body_mode, "response_body_mode": config.response_body_mode}
    wrong = [name for name, mode in modes.items() if mode != pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED]
    return f"{' and '.join(wrong)} must be FULL_DUPLEX_STREAMED" if wrong else ""


def subset_in(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that Envoy lets the picker choose from, None: all."""
    hint = _metadata(message, _SUBSET_NAMESPACE)
    return subset_of(_plain(hint.fields[_SUBSET])) if hint is not None and _SUBSET in hint.fields else None


def served_in(message: pb.ProcessingRequest) -> str:
    """The endpoint that answered, "" when Envoy does not say."""
    found = _metadata(message, _NAMESPACE)
    value = _plain(found.fields[SERVED]) if found is not None and SERVED in found.fields else ""
    if isinstance(value, str) and value:
        return value
    named = SERVED.encode()
    for name, text in headers_of(message.response_headers):
        if name == named:
            return text.decode("latin-1")
    return ""


def routed(headers: Mapping[str, str], remove: Iterable[str], endpoints: str) -> pb.ProcessingResponse:
    """Send the request to these endpoints (`ip:port[,ip:port]`), with these headers instead of the client's."""
    response = pb.ProcessingResponse()
    common = response.request_headers.response
    common.header_mutation.CopyFrom(mutation({**headers, DESTINATION: endpoints}, remove))
    common.clear_route_cache = True
    response.dynamic_metadata.update({_NAMESPACE: {DESTINATION: endpoints}})
    return response


def answered(headers: Iterable[tuple[str, str]], remove: Iterable[str]) -> pb.ProcessingResponse:
    """The answer's headers on their way to the client."""
    response = pb.ProcessingResponse()
    response.response_headers.response.header_mutation.CopyFrom(mutation(dict(headers), remove))
    return response


def request_pieces(body: bytes, *, is_last: bool) -> Iterator[pb.ProcessingResponse]:
    """The request's new body."""
    for piece, last in _cut(body):
        response = pb.ProcessingResponse()
        _put(response.request_body, piece, is_last=last and is_last)
        yield response


def answer_pieces(data: bytes, *, is_last: bool) -> Iterator[pb.ProcessingResponse]:
    """Pieces of the answer."""
    for piece, last in _cut(data):
        response = pb.ProcessingResponse()
        _put(response.response_body, piece, is_last=last and is_last)
        yield response


def immediate(
    status: int, headers: Iterable[tuple[str, str]], body: bytes, reason: str
) -> pb.ProcessingResponse:
    """Answer the client without an engine. reason: for Envoy's access log."""
    response = pb.ProcessingResponse()
    answer = response.immediate_response
    answer.status.code, answer.body, answer.details = status, body, reason
    answer.headers.CopyFrom(mutation(dict(headers), ()))
    return response


def mutation(headers: Mapping[str, str], remove: Iterable[str]) -> pb.HeaderMutation:
    """Headers to set and to take out."""
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")),
            append_action=_REPLACE,
        )
        for name, value in headers.items()
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=remove)


def _put(body: pb.BodyResponse, piece: bytes, *, is_last: bool) -> None:
    streamed = body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = piece, is_last


def _cut(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Pieces, and whether each is the last; one empty piece of nothing."""
    if len(data) <= PIECE_BYTES:
        yield data, True
        return
    view = memoryview(data)
    for at in range(0, len(data), PIECE_BYTES):
        yield bytes(view[at : at + PIECE_BYTES]), at + PIECE_BYTES >= len(data)


def _metadata(message: pb.ProcessingRequest, name: str) -> struct_pb2.Struct | None:
    found = message.metadata_context.filter_metadata  # looking up what is not there would add it
    return found[name] if name in found else None  # noqa: SIM401


def _plain(value: struct_pb2.Value) -> object:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    return value.string_value if kind == "string_value" else ""
