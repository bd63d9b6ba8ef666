"""The leading conductor is killed, then stopped, under load: failed requests, the time without decisions, their worth.

The time is that until a request is scheduled again, the worth how much of each prompt decisions find in a cache, over
before.

Two conductors, one gateway, instances that answer at once, and prompts whose beginnings are held by one instance each:
a decision that does not know the caches, or none at all, sends a prompt to an instance that does not have it. One
client sends those, so that no instance is busy and the caches alone decide; the others load a model of one instance.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from mooncache.auth import DEFAULT_TENANT
from mooncache.bench.gateway.stack import BOTH_MODEL, FAMILY_MODEL, Families, Stack, start_stack
from mooncache.bench.worker import WorkerError
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.processes import Part
from mooncache.config import load
from mooncache.errors import ConductorUnavailable, EngineFailed
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.reporting.rows import Row, bar_row

FAMILIES: Final = Families(count=32, instances=4, shared_tokens=2048, tenant=DEFAULT_TENANT)
CLIENTS: Final = 6
_PAUSE_S: Final = 0.05  # of each client, after an answer
_SETTLED_S: Final = 2.0  # decisions are compared from so long after the fault on
_REQUEST_S: Final = 30.0
_FIND_S: Final = 20.0
_KILLED_MAX_S: Final = 1.0
_STOPPED_MAX: Final = 1.5  # times `conductor.takeover_s`
_QUALITY: Final = 0.98
_NO_PLAN: Final = "unscheduled"


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """One request. `hit_share`: of its prompt, as the decision found it in a cache; None: no conductor decided."""

    begun_s: float
    ended_s: float
    error: str
    hit_share: float | None
    of_family: bool


@dataclass
class Requests:
    """Clients that send prompts until `end` is set, the first of them those of all families in turn."""

    stack: Stack
    served: list[ServedPrompt] = field(default_factory=list)
    end: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until `end`."""
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        headers = {"authorization": f"Bearer {self.stack.token.text}"}
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        turn, of_family = 0, number == 0
        model = FAMILY_MODEL if of_family else BOTH_MODEL
        while not self.end.is_set():
            prompt = FAMILIES.prompt(turn % FAMILIES.count, turn)
            turn += 1
            body = {"model": model, "prompt": prompt, "max_tokens": 2}
            url = f"http://127.0.0.1:{self.stack.gateway.port}/v1/completions"
            begun_s, error, plan = time.monotonic(), "", _NO_PLAN
            try:
                async with session.post(url, json=body) as answer:
                    text = await answer.text()
                    error = "" if answer.status == 200 else f"{answer.status} {text[:200]}"
                    plan = answer.headers.get("x-mooncache-plan", _NO_PLAN)
            except (aiohttp.ClientError, TimeoutError) as failed:
                error = repr(failed)
            share = _hit_share(plan, len(prompt))
            self.served.append(ServedPrompt(begun_s, time.monotonic(), error, share, of_family))
            await asyncio.sleep(_PAUSE_S)

    def hit_share(self, begin_s: float, end_s: float) -> float:
        """Mean share of the prompts that decisions found in a cache, of requests that began between two moments."""
        found = [
            one.hit_share or 0.0 for one in self.served if one.of_family and begin_s <= one.begun_s <= end_s
        ]
        return sum(found) / len(found) if found else 0.0

    def scheduled_again_s(self, fault_s: float) -> float:
        """From the fault until requests are scheduled, and none is left that is not."""
        after = [one for one in self.served if one.ended_s > fault_s]
        new = [one.ended_s for one in after if one.begun_s > fault_s and one.hit_share is not None]
        first = min(new, default=float("inf"))
        last = max((one.ended_s for one in after if one.hit_share is None), default=fault_s)
        return max(first, last) - fault_s

    @property
    def errors(self) -> list[str]:
        """What went wrong."""
        return [one.error for one in self.served if one.error]


def _hit_share(plan: str, prompt_tokens: int) -> float | None:
    fields = dict(part.partition("=")[::2] for part in plan.split(";"))
    if "local" not in fields:
        return None
    return (int(fields["local"]) + int(fields.get("pool", "0"))) / prompt_tokens


async def leader_of(stack: Stack) -> Part:
    """The conductor that leads. Raises ConductorUnavailable: none did for a while."""
    config = load(env={})
    end_s = time.monotonic() + _FIND_S
    while time.monotonic() < end_s:
        for part, target in zip(stack.conductors, stack.conductor_target.split(","), strict=True):
            link = ConductorLink(target, stack.token.text, config)
            try:
                answer = await link.call(
                    "WatchLeadership", pb.WatchLeadershipRequest(), pb.WatchLeadershipResponse, 1.0
                )
            except ConductorUnavailable:
                continue
            finally:
                await link.close()
            if answer.leading:
                return part
        await asyncio.sleep(0.1)
    raise ConductorUnavailable("No conductor leads.")


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Rows for a leader that is killed, and for one that is stopped and goes on later.

    Raises:
        EngineFailed: gateway, conductors or engines did not start.
    """
    seconds = 4.0 if quick else 10.0
    with ExitStack() as resources:
        progress("starting two conductors, a gateway and engines that answer at once")
        try:
            stack = resources.enter_context(start_stack(conductors=2, families=FAMILIES))
        except WorkerError as error:
            raise EngineFailed(str(error)) from None
        return asyncio.run(_measure(stack, seconds, progress))


async def _measure(stack: Stack, seconds: float, progress: Callable[[str], None]) -> list[Row]:
    progress("the leader is killed under load")
    leader = await leader_of(stack)
    rows = await _fault(stack, "killed", leader, signal.SIGKILL, seconds, at_most_s=_KILLED_MAX_S)
    leader.wait(5.0)
    leader.start()
    progress("the killed one is a standby by now; the new leader is stopped")
    await asyncio.sleep(_SETTLED_S)
    takeover_s = load(env={}).conductor.takeover_s
    stopped = await leader_of(stack)
    rows += await _fault(
        stack, "stopped", stopped, signal.SIGSTOP, seconds, at_most_s=_STOPPED_MAX * takeover_s
    )
    return rows


async def _fault(
    stack: Stack, what: str, leader: Part, number: signal.Signals, seconds: float, *, at_most_s: float
) -> list[Row]:
    load_of_requests = Requests(stack)
    clients = asyncio.create_task(load_of_requests.run())
    try:
        await asyncio.sleep(1.0)  # connections are open, prompts of all families known
        begun_s = time.monotonic()
        await asyncio.sleep(seconds)
        fault_s = time.monotonic()
        leader.send(number)
        await asyncio.sleep(_SETTLED_S + seconds)
        if number == signal.SIGSTOP:
            leader.send(signal.SIGCONT)  # what it says now must change nothing
            await asyncio.sleep(_SETTLED_S)
        end_s = time.monotonic()
    finally:
        load_of_requests.end.set()
        await clients
        if number == signal.SIGSTOP and leader.process is not None:
            os.kill(leader.process.pid, signal.SIGCONT)
    before = load_of_requests.hit_share(begun_s, fault_s - 0.5)
    after = load_of_requests.hit_share(fault_s + _SETTLED_S, end_s)
    return [
        Row(f"{what}: requests served", float(len(load_of_requests.served)), ""),
        bar_row(f"{what}: failed requests", float(len(load_of_requests.errors)), "", at_most=0.0),
        bar_row(
            f"{what}: until requests are scheduled again",
            load_of_requests.scheduled_again_s(fault_s),
            "s",
            at_most=at_most_s,
        ),
        Row(f"{what}: share of prompts found in caches, before", before, ""),
        bar_row(
            f"{what}: the same from {_SETTLED_S:g} s after on",
            after,
            "",
            against="before",
            reference=before,
            at_least=_QUALITY,
        ),
    ]
