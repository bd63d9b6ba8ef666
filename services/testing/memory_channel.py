"""Channel in memory: a network that loses, delays, repeats and reorders messages by a seed.

Idea: every message (request and response count separately) gets its fate from one seeded generator: lost,
late, or delivered twice. Different delays reorder by themselves. Messages are serialised and parsed as over a
wire, so that nothing is shared by accident. What the control plane promises to survive is exactly what
NetworkFaults can express, plus partitions (`block`) and dead or restarted processes (`stop`, `serve` again).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from mooncache.auth import Identity
from mooncache.errors import Closed, DeadlineExceeded, MasterUnavailable, MooncacheError
from mooncache.runtime.channel import Response
from mooncache.runtime.clock import Clock
from mooncache.runtime.plain_structlog import structlog
from mooncache.runtime.rpc import MASTER_SERVICE, check_method, methods_of
from mooncache.runtime.run_op import OpRunner


class Authenticates(Protocol):
    """Turns "Bearer <token>", which stays inside this process, into an identity; raises Unauthenticated."""

    def identify(self, authorization: str) -> Identity: ...


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Chances are 0 to 1 for each message; delays are seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_min_s: float = 0.0002
    delay_max_s: float = 0.002
    slow: float = 0.0
    slow_delay_s: float = 1.0


class MemoryNetwork:
    """All addresses of one simulated world. Time and randomness come from outside."""

    def __init__(self, clock: Clock, rng: random.Random, faults: NetworkFaults | None = None) -> None:
        self.clock = clock
        self.rng = rng
        self.faults = faults or NetworkFaults()
        self.counts: Counter[str] = Counter()  # sent, lost, blocked, duplicated, delivered, refused
        self._servers: dict[str, tuple[OpRunner, Authenticates]] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._work: dict[str, set[asyncio.Task[object]]] = {}

    def serve(self, address: str, runner: OpRunner, authenticator: Authenticates) -> None:
        """Let a service listen at an address; replaces the one that listened there."""
        self.stop(address)
        self._servers[address] = runner, authenticator

    def stop(self, address: str) -> None:
        """Kill what listens at an address: its calls under way are cut off in the middle."""
        self._servers.pop(address, None)
        for task in self._work.pop(address, set()):
            task.cancel()

    def channel(
        self,
        source: str,
        target: str,
        service: ServiceDescriptor = MASTER_SERVICE,
        *,
        token: str = "",
        unavailable_error: type[MooncacheError] = MasterUnavailable,
    ) -> MemoryChannel:
        """A channel from one address to another; `token` is what GrpcChannel would prove."""
        return MemoryChannel(self, source, target, service, f"Bearer {token}", unavailable_error)

    def block(self, source: str, target: str, *, both_ways: bool = True) -> None:
        """Swallow every message between two addresses from now on."""
        self._blocked.add((source, target))
        if both_ways:
            self._blocked.add((target, source))

    def partition(self, group: set[str], others: set[str]) -> None:
        """Block every pair across two groups."""
        for left in group:
            for right in others:
                self.block(left, right)

    def heal(self) -> None:
        """Take every block back."""
        self._blocked.clear()

    def drops(self, source: str, target: str) -> bool:
        """Decide the fate of one message: True when it never arrives."""
        self.counts["sent"] += 1
        if (source, target) in self._blocked:
            self.counts["blocked"] += 1
            return True
        if self.rng.random() < self.faults.loss:
            self.counts["lost"] += 1
            return True
        return False

    def delay_s(self) -> float:
        """How long one message travels."""
        delay_s = self.rng.uniform(self.faults.delay_min_s, self.faults.delay_max_s)
        return delay_s + (self.faults.slow_delay_s if self.rng.random() < self.faults.slow else 0.0)

    def duplicates(self) -> bool:
        """Whether one request arrives twice."""
        twice = self.rng.random() < self.faults.duplicate
        self.counts["duplicated"] += twice
        return twice

    def start(self, address: str, method: str, data: bytes, how: _Call) -> asyncio.Task[bytes] | None:
        """Deliver a request: a task that yields the response's bytes, or None when nothing listens."""
        server = self._servers.get(address)
        if server is None:
            self.counts["refused"] += 1
            return None
        self.counts["delivered"] += 1
        task = asyncio.ensure_future(_serve(*server, method, data, how))
        self.own(address, task)
        return task

    def own(self, address: str, task: asyncio.Task[object]) -> None:
        """Tie a task to an address: killing what listens there ends the task."""
        tasks = self._work.setdefault(address, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_look_at)


@dataclass(frozen=True, slots=True)
class _Call:
    authorization: str
    request_id: str
    timeout_s: float


async def _serve(
    runner: OpRunner, authenticator: Authenticates, method: str, data: bytes, how: _Call
) -> bytes:
    response = await runner.run(
        method,
        data,
        identify=lambda: authenticator.identify(how.authorization),
        request_id=how.request_id,
        timeout_s=how.timeout_s,
    )
    return response.SerializeToString()


def _look_at(task: asyncio.Task[object]) -> None:
    """Take a finished task's exception, so that an answer that is not awaited gives no warning."""
    if not task.cancelled():
        task.exception()


class MemoryChannel:
    """A `Channel` through a simulated network. Made by MemoryNetwork.channel."""

    def __init__(
        self,
        network: MemoryNetwork,
        source: str,
        target: str,
        service: ServiceDescriptor,
        authorization: str,
        unavailable_error: type[MooncacheError],
    ) -> None:
        self._network = network
        self._source = source
        self.target = target
        self._methods = methods_of(service)
        self._authorization = authorization
        self._unavailable_error = unavailable_error
        self._closed = False

    async def call(
        self, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        """Call one method; the contract is `Channel.call`."""
        if self._closed:
            raise Closed(f"The channel to {self.target} is closed.")
        check_method(self._methods, method, response_class)
        message = f"{method} to {self.target} did not finish within {timeout_s:g} s."
        if timeout_s <= 0:
            raise DeadlineExceeded(message)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(method, request, response_class, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(message) from None

    async def close(self) -> None:
        """Close the channel."""
        self._closed = True

    async def _exchange(
        self, method: str, request: Message, response_class: type[Response], timeout_s: float
    ) -> Response:
        network = self._network
        data = request.SerializeToString()
        # Under simulation even ids come from the seed. What a call leads to has its id, as over a wire.
        drawn = f"{network.rng.getrandbits(64):016x}"
        request_id = str(structlog.contextvars.get_contextvars().get("request_id") or drawn)
        how = _Call(self._authorization, request_id, timeout_s)
        if network.duplicates():
            self._send_late(method, data, how)
        if network.drops(self._source, self.target):
            await _for_ever()
        await network.clock.sleep(network.delay_s())
        task = network.start(self.target, method, data, how)
        if task is None:
            raise self._unavailable_error(f"Nothing listens at {self.target}.")
        failure: MooncacheError | None = None
        answer = b""
        try:
            answer = await asyncio.shield(task)
        except MooncacheError as error:
            failure = error
        except asyncio.CancelledError:
            if task.cancelled():  # the other end was killed, not this caller
                raise self._unavailable_error(f"{self.target} went away during {method}.") from None
            raise
        if network.drops(self.target, self._source):
            await _for_ever()
        await network.clock.sleep(network.delay_s())
        if failure is not None:
            raise type(failure)(failure.message)
        return response_class.FromString(answer)

    def _send_late(self, method: str, data: bytes, how: _Call) -> None:
        network = self._network

        async def arrive() -> None:
            await network.clock.sleep(network.delay_s() * 2)
            if not network.drops(self._source, self.target):
                network.start(self.target, method, data, how)

        network.own(self.target, asyncio.ensure_future(arrive()))


async def _for_ever() -> None:
    """A message that never arrives; the caller's deadline ends the wait."""
    await asyncio.get_running_loop().create_future()
