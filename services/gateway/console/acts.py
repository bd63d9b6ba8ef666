"""Does what operators ask on the console, and keeps each act in the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.message import Message

from mooncache.accounts.audit_log import append
from mooncache.accounts.core.audit import DONE, AuditEntry
from mooncache.accounts.database import AccountsPlace
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.master_link import MasterLink
from mooncache.errors import OK, Internal, LimitExceeded, MooncacheError, NotFound
from mooncache.gateway.console.messages import act_request
from mooncache.gateway.core.console_acts import ActKind, ConsoleAct
from mooncache.proto.v1 import conductor_pb2, master_pb2
from mooncache.runtime.channel import Response
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger, redact_text
from mooncache.runtime.tasks import uninterrupted

ACTS_MAX: Final = 4
"""Acts under way at a gateway at the same time."""
PIN_S: Final = 3600
_CALL_S: Final = 10.0
_ATTEMPT_S: Final = 5.0
_CLOSE_S: Final = 5.0

Answer = TypeVar("Answer")
log = get_logger(__name__)


class ActResult(NamedTuple):
    """What came of an act. `audited` False: the log could not take it; what is done is not undone by a full disk."""

    said: str
    audited: bool


class AuditedActs:
    """Runs what operators ask for, a few acts at a time, and keeps each in the audit log."""

    def __init__(self, clock: Clock, accounts: AccountsPlace) -> None:
        """accounts: where the audit log is."""
        self._clock, self._accounts = clock, accounts
        self._under_way: set[asyncio.Task[Any]] = set()

    async def run(
        self, command: Sequence[str], who: str, details: dict[str, str], work: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, bool]:
        """Do it, and keep it under the command that does the same; its answer, and whether the log has it.

        It goes on when who asked leaves: what has begun in a thread cannot be taken back, and is kept as what came of
        it. details: what the entry says beyond the command; `work` may add to them. Raises LimitExceeded, and what
        `work` raises.
        """
        if len(self._under_way) >= ACTS_MAX:
            raise LimitExceeded("Too many acts are under way on this console; try again.")
        act = asyncio.create_task(self._run(command, who, details, work))
        self._under_way.add(act)
        act.add_done_callback(self._under_way.discard)
        return await uninterrupted(act)

    async def close(self) -> None:
        """Wait for the acts under way, for a while."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=_CLOSE_S)

    async def _run(
        self, command: Sequence[str], who: str, details: dict[str, str], work: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, bool]:
        result, audited = "CANCELLED", False
        try:
            answer = await work()
            result = DONE
        except MooncacheError as error:
            result = error.name
            raise
        except Exception:
            result = Internal.name
            raise
        finally:
            audited = await asyncio.shield(asyncio.to_thread(self._keep, command, who, result, details))
        return answer, audited

    def _keep(self, command: Sequence[str], who: str, result: str, details: dict[str, str]) -> bool:
        what, *arguments = map(redact_text, command)
        entry = AuditEntry(
            unix_ms=round(self._clock.wall_s() * 1e3),
            who=who,
            what=what,
            arguments=arguments,
            result=result,
            details={"by": "console", **{name: redact_text(text) for name, text in details.items()}},
        )
        try:
            append(self._accounts, entry)
        except MooncacheError as error:
            log.error(Event.CONSOLE_ACT_NOT_AUDITED, act=what, who=who, error=error.message)
            return False
        return True


class ConsoleActs:
    """Over the collector's connections, which it does not own."""

    def __init__(self, link: ConductorLink, master: MasterLink, acts: AuditedActs) -> None:
        self._link, self._master, self._acts = link, master, acts

    async def do(self, act: ConsoleAct, who: str) -> ActResult:
        """Do it, and keep it.

        Raises LimitExceeded, NotFound for a prefix that is read no longer, and what conductor or master answered.
        """
        details: dict[str, str] = {}

        async def work() -> str:
            said = await self._do(act)
            if said:
                details["said"] = said
            return said

        return ActResult(*await self._acts.run(act.command, who, details, work))

    async def _do(self, act: ConsoleAct) -> str:
        """Do it; a sentence about what came of it, "" when there is nothing to say."""
        if act.prefix_name:
            return await self._to_prefix(act)
        request = act_request(act)
        if isinstance(request, conductor_pb2.SetInstanceRequest):
            await self._link.call("SetInstance", request, conductor_pb2.SetInstanceResponse, _CALL_S)
        else:
            await self._ask_master("DrainNode", request, master_pb2.DrainNodeResponse)
        return ""

    async def _to_prefix(self, act: ConsoleAct) -> str:
        asked = conductor_pb2.ListHotPrefixesRequest(name=act.prefix_name)
        answer = await self._link.call(
            "ListHotPrefixes", asked, conductor_pb2.ListHotPrefixesResponse, _CALL_S
        )
        if not answer.prefixes:
            raise NotFound(f"The conductor no longer knows prefix {act.name}: it was not read for a while.")
        keys, tenant = answer.prefixes[0].keys, answer.prefixes[0].pool_tenant
        if act.kind is ActKind.COPY_PREFIX:
            copy = master_pb2.ReplicateBlocksRequest(keys=keys, replica_count=act.copies, tenant=tenant)
            task = await self._ask_master("ReplicateBlocks", copy, master_pb2.ReplicateBlocksResponse)
            return f"Task {task.task_id} copies the blocks."
        if act.kind is ActKind.PIN_PREFIX:
            pin = master_pb2.PinBlocksRequest(keys=keys, ttl_ms=PIN_S * 1000, tenant=tenant)
            codes = (await self._ask_master("PinBlocks", pin, master_pb2.PinBlocksResponse)).codes
            return f"{sum(code == OK for code in codes)} of {len(codes)} blocks are pinned for an hour."
        remove = master_pb2.RemoveBlocksRequest(keys=keys, tenant=tenant)
        codes = (await self._ask_master("RemoveBlocks", remove, master_pb2.RemoveBlocksResponse)).codes
        return f"{sum(code == OK for code in codes)} of {len(codes)} blocks are in the pool no longer."

    async def _ask_master(self, method: str, request: Message, response_class: type[Response]) -> Response:
        return await self._master.call(method, request, response_class, _CALL_S, attempt_s=_ATTEMPT_S)
