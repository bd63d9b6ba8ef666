"""A Kubernetes API in memory, as far as elections use it: one Lease, and lines to it that lose and delay calls.

An object that carries another resourceVersion or uid than the one that is kept is refused, as the API server does it.
One that carries none is taken whatever it was made from, as there, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from mooncache.coordination.lease_api import LeaseChangedError
from mooncache.coordination.lease_object import Lease, lease_of
from mooncache.errors import MasterUnavailable


class Travel(NamedTuple):
    """One call's way: seconds there and back; whether the request, or the answer to one carried out, is lost."""

    there_s: float
    back_s: float
    lost: bool
    answer_lost: bool = False


class MemoryLease:
    """The one Lease, as an API server keeps it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: dict[str, Any] | None = None
        self.created_s = 0.0
        self.version = 0

    def get(self) -> Lease | None:
        return None if self.made is None else self._lease()

    def create(self, made: dict[str, Any]) -> Lease:
        if self.made is not None:
            raise LeaseChangedError
        self.created_s = asyncio.get_running_loop().time()
        return self._keep(made | {"metadata": made["metadata"] | {"uid": f"u{self.version}"}})

    def replace(self, made: dict[str, Any]) -> Lease:
        if self.made is None:
            raise LeaseChangedError
        there = self.made["metadata"]
        for name in ("resourceVersion", "uid"):
            if made["metadata"].setdefault(name, there[name]) != there[name]:
                raise LeaseChangedError
        return self._keep(made)

    def _keep(self, made: dict[str, Any]) -> Lease:
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        self.made = made
        return self._lease()

    def _lease(self) -> Lease:
        return lease_of(json.dumps(self.made).encode(), self.name)


class LeaseLine:
    """One candidate's way to the API server, with the methods of `LeaseApi`. travel: decides about each call."""

    namespace, endpoint = "models", "memory"

    def __init__(self, lease: MemoryLease, travel: Callable[[], Travel]) -> None:
        self.name = lease.name
        self._lease, self._travel = lease, travel

    async def get(self, timeout_s: float) -> Lease | None:
        found: Lease | None = await self._call(self._lease.get, timeout_s)
        return found

    async def create(self, made: dict[str, Any], timeout_s: float) -> Lease:
        found: Lease = await self._call(lambda: self._lease.create(made), timeout_s)
        return found

    async def replace(self, made: dict[str, Any], timeout_s: float) -> Lease:
        found: Lease = await self._call(lambda: self._lease.replace(made), timeout_s)
        return found

    async def close(self) -> None:
        """Nothing is open."""

    async def _call(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """A request that was given up arrives all the same, some time or never."""
        travel = self._travel()
        try:
            async with asyncio.timeout(timeout_s):
                if travel.lost:
                    await asyncio.sleep(timeout_s + 1)
                answer = await asyncio.shield(self._sent(call, travel.there_s))
                await asyncio.sleep(travel.back_s + (timeout_s + 1 if travel.answer_lost else 0))
                return answer
        except TimeoutError:
            raise MasterUnavailable("The Kubernetes API did not answer in time.") from None

    def _sent(self, call: Callable[[], Any], there_s: float) -> asyncio.Task[Any]:
        async def arrive() -> Any:
            await asyncio.sleep(there_s)
            return call()

        # It is on its way, whatever becomes of the process that sent it.
        done = asyncio.get_running_loop().create_task(arrive(), context=contextvars.Context())
        done.add_done_callback(lambda one: one.cancelled() or one.exception())
        return done
