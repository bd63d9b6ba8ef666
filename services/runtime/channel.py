"""The protocol that callers are written against."""

from __future__ import annotations

from typing import Protocol, TypeVar

from google.protobuf.message import Message

Response = TypeVar("Response", bound=Message)


class Channel(Protocol):
    """A way to one service at one address. Calls are unary and may be lost, late or repeated."""

    async def call(
        self, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        """Call an RPC by its short name, for example "Heartbeat", and return its response, a `response_class`.

        Raises MooncacheError: the service's own refusal, the channel's `unavailable_error` when nothing
        answers at the address, or DeadlineExceeded after `timeout_s` seconds (the call may or may not have
        been carried out).
        """
        ...

    async def close(self) -> None:
        """Give the connection up; calls under way fail."""
        ...
