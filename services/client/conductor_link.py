"""A line to the conductor, for gateways, workers and commands: a deadline on every call.

With one conductor nothing here retries: its state is soft, and callers decide what to do without it. With standbys the
link follows the one that leads. It listens at every conductor, so that it hears at once when another one leads; calls
under way to the former are given up and made again there. An answer of a leader that a newer one has followed is never
believed (`term`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from google.protobuf.message import Message

from mooncache.auth import TokenSource
from mooncache.client.master_link import parse_targets
from mooncache.config import Config
from mooncache.errors import (
    ConductorUnavailable,
    ConnectionLost,
    MooncacheError,
    NotLeader,
)
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import tls
from mooncache.runtime.channel import Response
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE
from mooncache.runtime.tasks import cancel_all, cancellations, wait_for_event

_PAUSE_S: Final = 0.05  # after none of them led
_LISTEN_S: Final = 10.0
_FIND_S: Final = 1.0
_LISTEN_AGAIN_S: Final = 0.25
_LISTEN_GRACE_S: Final = 1.0
_MOVE_ON: Final = (NotLeader, ConductorUnavailable, ConnectionLost)


def conductor_targets(text: str) -> tuple[str, ...]:
    """The addresses in `cluster.conductor_target`. Raises InvalidArgument where several are named and one is none."""
    return parse_targets(text, "conductor") if "," in text else (text.strip(),)


class ConductorLink:
    """Calls the conductor from one event loop; the connections are opened by the first call.

    Args:
        target: host:port, or several with commas between them, as in `cluster.conductor_target`.
        token: the cluster token's text, or where it comes from at each call.
        config: for TLS.
        listen: hear of a new leader at once; False for a command, which asks who leads before its first call.
    """

    def __init__(self, target: str, token: str | TokenSource, config: Config, *, listen: bool = True) -> None:
        self._targets = conductor_targets(target)
        credentials = tls.channel_credentials(config.tls)
        self._channels = [
            GrpcChannel(
                each,
                CONDUCTOR_SERVICE,
                token=token,
                credentials=credentials,
                unavailable_error=ConductorUnavailable,
                server_name=config.tls.server_name,
            )
            for each in self._targets
        ]
        self._current = 0
        self.term = 0
        """Newest term of a leading conductor that was heard of; 0 before, and with one conductor."""
        self._moved = asyncio.Event()
        self._under_way: set[asyncio.Future[Any]] = set()
        self._listen = listen and self.several
        self._listeners: list[asyncio.Task[None]] = []

    @property
    def several(self) -> bool:
        """Whether there are standbys."""
        return len(self._targets) > 1

    @property
    def target(self) -> str:
        """host:port of the conductor that answered last, or that is tried next."""
        return self._targets[self._current]

    async def call(
        self, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        """Call `method` of ConductorService, at the one that leads.

        Raises:
            ConductorUnavailable: nothing answers there, or none led in time. DeadlineExceeded: no answer in time.
            MooncacheError: the conductor's own refusal.
        """
        if not self.several:
            return await self._channels[0].call(method, request, response_class, timeout_s)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        if self._listen:
            self._begin_to_listen()
        elif not self.term:
            await self._find_leader(timeout_s)
        last = "none of them was asked"
        tried = 0
        while (left_s := until_s - loop.time()) > 0:
            at, moved = self._current, self._moved
            try:
                answer = await self._attempt(at, moved, method, request, response_class, left_s)
            except _MOVE_ON as error:
                last = error.message
                self._pass_over(at)
                tried += 1
                if tried % len(self._targets) == 0:
                    # shorter when another conductor leads meanwhile
                    await wait_for_event(self._moved, max(0.0, min(_PAUSE_S, until_s - loop.time())))
                continue
            if answer is not None:
                return answer
        raise ConductorUnavailable(
            f"No leading conductor answered {method} within {timeout_s:g} s at {', '.join(self._targets)}: {last}"
        )

    async def moved(self, term: int) -> int:
        """Wait until another term than this one is the newest; return it. Never returns with one conductor."""
        if not self.several:
            await asyncio.get_running_loop().create_future()
        self._begin_to_listen()
        while self.term == term:
            await self._moved.wait()
        return self.term

    async def close(self) -> None:
        """Close the connections; calls under way end with Cancelled."""
        listeners, self._listeners, self._listen = self._listeners, [], False
        await cancel_all(listeners)
        for channel in self._channels:
            await channel.close()

    async def _attempt(
        self,
        at: int,
        moved: asyncio.Event,
        method: str,
        request: Message,
        response_class: type[Response],
        timeout_s: float,
    ) -> Response | None:
        """One call to one conductor; None when another leads by now. Raises MooncacheError."""
        if "known_term" in request.DESCRIPTOR.fields_by_name:
            request.known_term = self.term  # type: ignore[attr-defined]
        call = asyncio.ensure_future(self._channels[at].call(method, request, response_class, timeout_s))
        self._under_way.add(call)
        cancels = cancellations()
        try:
            answer = await call
        except asyncio.CancelledError:
            if cancellations() > cancels or not moved.is_set():
                raise
            return None  # `_follow` has given it up
        finally:
            self._under_way.discard(call)
        term = int(getattr(answer, "term", 0))
        if term and term < self.term:
            raise NotLeader(
                f"{self._targets[at]} answered as a leader of term {term}; one of {self.term} leads."
            )
        if term > self.term:
            self._follow(at, term)
        return answer

    async def _find_leader(self, timeout_s: float) -> None:
        """Ask all of them which one leads; where none does the order stays."""

        async def ask(at: int) -> None:
            with contextlib.suppress(MooncacheError):
                answer = await self._channels[at].call(
                    "WatchLeadership",
                    pb.WatchLeadershipRequest(),
                    pb.WatchLeadershipResponse,
                    min(timeout_s, _FIND_S),
                )
                if answer.leading and answer.term > self.term:
                    self._follow(at, answer.term)

        await asyncio.gather(*(ask(at) for at in range(len(self._targets))))

    def _begin_to_listen(self) -> None:
        if not self._listeners:
            self._listeners = [
                asyncio.create_task(self._listen_at(at), name=f"leadership of {target}")
                for at, target in enumerate(self._targets)
            ]

    async def _listen_at(self, at: int) -> None:
        """Hear from one conductor whether it leads, until cancelled."""
        request = pb.WatchLeadershipRequest(wait_ms=int(_LISTEN_S * 1e3))
        while True:
            try:
                answer = await self._channels[at].call(
                    "WatchLeadership", request, pb.WatchLeadershipResponse, _LISTEN_S + _LISTEN_GRACE_S
                )
            except MooncacheError:
                request.known_term, request.known_leading = 0, False
                await asyncio.sleep(_LISTEN_AGAIN_S)
                continue
            request.known_term, request.known_leading = answer.term, answer.leading
            if answer.leading and answer.term > self.term:
                self._follow(at, answer.term)

    def _follow(self, at: int, term: int) -> None:
        """The conductor leads in a newer term than all before."""
        self._current, self.term = at, term
        self._moved.set()
        self._moved = asyncio.Event()
        for call in self._under_way:
            call.cancel()

    def _pass_over(self, at: int) -> None:
        if self._current == at:  # another call may have moved on already
            self._current = (at + 1) % len(self._targets)
