"""The network of a simulated cluster: control calls of the real code, and the calls of the modelled data plane.

A control call is encoded, travels, is decoded and handled by the real table of the process that listens there, in the
context of that process. Each message has its own fate (lost, late, twice); links can be cut in one direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

from mooncache.auth import DEFAULT_TENANT, Authenticator, Token
from mooncache.errors import ConnectionLost, DeadlineExceeded, MooncacheError
from mooncache.runtime.clock import Clock
from mooncache.runtime.run_op import OpRunner
from mooncache.testing.memory_channel import MemoryNetwork, NetworkFaults, _Call
from tests.simulation.scheduler import PROCESS, Process

CLUSTER = Token(DEFAULT_TENANT, admin=True, key=b"s" * 32)
T = TypeVar("T")


class Trace:
    """A running hash of what happened: two runs of one seed are the same when this is."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self.count = 0
        self.lines: list[str] | None = None

    def note(self, now_s: float, *what: object) -> None:
        line = f"{now_s:.6f} " + " ".join(map(str, what))
        self._hash.update(line.encode())
        self.count += 1
        if self.lines is not None:
            self.lines.append(line)

    def digest(self) -> str:
        return self._hash.hexdigest()


class _Gate:
    """Who calls, by the real check, once for each token: those of a world are never replaced."""

    def __init__(self) -> None:
        self.identify = functools.cache(Authenticator(CLUSTER).identify)


class SimNetwork(MemoryNetwork):
    """All addresses of one world."""

    def __init__(self, clock: Clock, rng: random.Random, trace: Trace) -> None:
        super().__init__(clock, rng, NetworkFaults())
        self.trace = trace
        self.calls: Counter[str] = Counter()  # delivered, by method
        self.slow_links: dict[str, float] = {}  # address -> seconds more for every message to it
        self._gate = _Gate()
        self._homes: dict[str, Process] = {}
        self._answers: dict[str, set[asyncio.Future[bytes]]] = {}
        self._data_calls: dict[str, set[asyncio.Future[Any]]] = {}

    def listen(self, address: str, process: Process, runner: OpRunner | None) -> None:
        """A process listens at an address."""
        self._homes[address] = process
        if runner is not None:  # else it takes calls of the data plane alone
            self._servers[address] = runner, self._gate

    def reset(self, address: str) -> None:
        """The process is gone: connections to it break."""
        self._servers.pop(address, None)
        self._homes.pop(address, None)
        for pending in (self._answers.pop(address, set()), self._data_calls.pop(address, set())):
            for future in pending:
                future.cancel()

    def start(self, address: str, method: str, data: bytes, how: _Call) -> Any:
        server, home = self._servers.get(address), self._homes.get(address)
        if server is None or home is None or home.dead:
            self.counts["refused"] += 1
            return None
        self.counts["delivered"] += 1
        self.calls[method] += 1
        self.trace.note(self.clock.now_s(), address, method, len(data))
        runner, authenticator = server
        # In a context of no process: it is the connection's, and breaks with it.
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        pending = self._answers.setdefault(address, set())
        pending.add(answer)
        answer.add_done_callback(pending.discard)

        async def serve() -> None:
            try:
                response = await runner.run(
                    method,
                    data,
                    identify=lambda: authenticator.identify(how.authorization),
                    request_id=how.request_id,
                    timeout_s=how.timeout_s,
                )
            except MooncacheError as error:
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()
                return
            if not answer.done():
                answer.set_result(response.SerializeToString())

        home.spawn(serve())
        return answer

    def rejoin(self, group: set[str], others: set[str]) -> None:
        """Take the blocks between two groups back."""
        self._blocked -= {
            pair for left in group for right in others for pair in ((left, right), (right, left))
        }

    def own(self, address: str, task: asyncio.Task[object]) -> None:
        """Late messages belong to the network alone."""

    def delay_to_s(self, target: str) -> float:
        """How long a message of the data plane travels."""
        return self.delay_s() + self.slow_links.get(target, 0.0)

    async def data_call(
        self, source: str, target: str, work: Callable[[], Awaitable[T] | T], timeout_s: float
    ) -> T:
        """One call of the data plane: to the target, its work there, and back. Connections do not repeat messages.

        Raises: ConnectionLost, DeadlineExceeded, MooncacheError of the work.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._data_call(source, target, work)
        except TimeoutError:
            raise DeadlineExceeded(f"{target} did not answer within {timeout_s:g} s.") from None

    async def _data_call(self, source: str, target: str, work: Callable[[], Any]) -> Any:
        if (source, target) in self._blocked:
            await asyncio.get_running_loop().create_future()
        await self.clock.sleep(self.delay_to_s(target))
        home = self._homes.get(target)
        if home is None or home.dead:
            raise ConnectionLost(f"Nothing listens at {target}.")
        self.trace.note(self.clock.now_s(), source, "->", target)
        caller = PROCESS.get()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pending = self._data_calls.setdefault(target, set())
        pending.add(answer)
        answer.add_done_callback(pending.discard)

        async def serve() -> None:
            if caller is not None and caller.dead:
                return  # its connection ended with it
            try:
                result = work()
                if asyncio.iscoroutine(result):
                    result = await result
            except MooncacheError as error:
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()
                return
            if not answer.done():
                answer.set_result(result)

        serving = home.spawn(serve())
        try:
            result = await answer
        except asyncio.CancelledError:
            if answer.cancelled() and not _is_cancelled():
                raise ConnectionLost(f"{target} went away.") from None
            serving.cancel()
            raise
        if (target, source) in self._blocked:
            await asyncio.get_running_loop().create_future()
        await self.clock.sleep(self.delay_to_s(source))
        return result

    def channel_for(self, service: Any, unavailable: type[MooncacheError]) -> Callable[[str], Any]:
        """What makes channels of the process that runs now."""
        process = PROCESS.get()
        assert process is not None
        name = process.name
        return lambda target: self.channel(
            name, target, service, token=CLUSTER.text, unavailable_error=unavailable
        )


def call_id() -> str:
    """The id of the control call that this code works for, as all calls have it that follow from one; "" for none."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def refusals_are_fine() -> Any:
    """Whatever the cluster answers, as long as it is an error of the catalogue."""
    with contextlib.suppress(MooncacheError):
        yield
