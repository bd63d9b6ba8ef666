"""Talking to whichever master leads: tries the known targets in turn, follows NOT_LEADER, never waits past a deadline.

Idea: a caller names several master targets; one of them leads. The link remembers the last one that answered and
begins there. An answer of NOT_LEADER or no answer at all moves on to the next target; after a fruitless round it
waits a jittered moment. Refusals of the leader itself (wrong token, bad argument) are raised at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from mooncache.errors import (
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    MasterUnavailable,
    MooncacheError,
    NodeUnavailable,
    NotLeader,
)
from mooncache.runtime.backoff import Backoff
from mooncache.runtime.channel import Channel, Response
from mooncache.runtime.clock import Clock

MAX_TARGETS = 16
_MIN_ATTEMPT_S = 0.05
_MOVE_ON = (NotLeader, MasterUnavailable, NodeUnavailable, ConnectionLost, DeadlineExceeded)


def parse_targets(text: str | Sequence[str], what: str = "master") -> tuple[str, ...]:
    """Targets of masters, or of `what`, from "host:port[,host:port…]" or a sequence of them.

    Raises:
        InvalidArgument: no target, too many, or one without a port.
    """
    parts = text.split(",") if isinstance(text, str) else list(text)
    targets = tuple(part.strip() for part in parts if part.strip())
    if not targets:
        raise InvalidArgument(f"No {what} target given. Expected host:port, for example 127.0.0.1:7700.")
    if len(targets) > MAX_TARGETS:
        raise InvalidArgument(f"{len(targets)} {what} targets; the maximum is {MAX_TARGETS}.")
    for target in targets:
        host, colon, port = target.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise InvalidArgument(
                f"{target!r} is not a {what} target. Expected host:port, for example 127.0.0.1:7700."
            )
    return targets


class MasterLink:
    """A leader-following caller. One event loop; `channel_for` makes the channel of one target."""

    def __init__(
        self,
        targets: Sequence[str],
        channel_for: Callable[[str], Channel],
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._targets = list(targets)
        self._channel_for = channel_for
        self._channels: dict[str, Channel] = {}
        self._clock = clock
        self._rng = rng
        self._current = 0

    @property
    def current_target(self) -> str:
        """Target that answered last, or the one to be tried next."""
        return self._targets[self._current]

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self._targets)

    def suggest(self, target: str) -> None:
        """Begin with this target next time (the cluster map names the leader)."""
        if target in self._targets:
            self._current = self._targets.index(target)

    async def call(
        self,
        method: str,
        request: Message,
        response_class: type[Response],
        timeout_s: float,
        attempt_s: float | None = None,
    ) -> Response:
        """Call the leader. `attempt_s` bounds one attempt; the whole never takes longer than `timeout_s`.

        Raises:
            MasterUnavailable: no leader answered in time; the text names the targets and the last reason.
            MooncacheError: the leader's own refusal.
        """
        backoff = Backoff(self._rng, first_s=0.05, cap_s=1.0)
        deadline_s = self._clock.now_s() + timeout_s
        last: MooncacheError | None = None
        while True:
            for _ in range(len(self._targets)):
                left_s = deadline_s - self._clock.now_s()
                if left_s <= 0:
                    raise self._unavailable(timeout_s, last)
                target = self.current_target
                share_s = left_s if attempt_s is None else min(left_s, attempt_s)
                try:
                    limit_s = max(share_s, _MIN_ATTEMPT_S)
                    return await self._channel().call(method, request, response_class, limit_s)
                except _MOVE_ON as error:
                    last = error
                    self._move_on(target)
            wait_s = backoff.next_s()
            if self._clock.now_s() + wait_s >= deadline_s:
                raise self._unavailable(timeout_s, last)
            await self._clock.sleep(wait_s)

    async def call_once(
        self, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        """One attempt at the current target; a failure moves on to the next target and is raised as it is."""
        target = self.current_target
        try:
            return await self._channel().call(method, request, response_class, timeout_s)
        except _MOVE_ON:
            self._move_on(target)
            raise

    def pass_over(self) -> None:
        """Begin with the next target next time: the one that answered is not the leader to follow."""
        self._move_on(self.current_target)

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _move_on(self, target: str) -> None:
        if self.current_target == target:  # another call may have moved on already
            self._current = (self._current + 1) % len(self._targets)

    def _channel(self) -> Channel:
        target = self.current_target
        if target not in self._channels:
            self._channels[target] = self._channel_for(target)
        return self._channels[target]

    def _unavailable(self, timeout_s: float, last: MooncacheError | None) -> MasterUnavailable:
        reason = f" Last answer: {last.message}" if last is not None else ""
        return MasterUnavailable(
            f"No leading master answered within {timeout_s:g} s at {', '.join(self._targets)}.{reason}"
        )
