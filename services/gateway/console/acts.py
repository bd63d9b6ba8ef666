"""Does what operators ask on the console, and keeps each act in the audit log."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from google.protobuf.message import Message

from mooncache.accounts.audit_log import append
from mooncache.accounts.core.audit import DONE, AuditEntry
from mooncache.accounts.database import AccountsPlace
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.master_link import MasterLink
from mooncache.errors import OK, LimitExceeded, MooncacheError, NotFound
from mooncache.gateway.console.messages import act_request
from mooncache.gateway.core.console_acts import ActKind, ConsoleAct
from mooncache.proto.v1 import conductor_pb2, master_pb2
from mooncache.runtime.channel import Response
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger

ACTS_MAX: Final = 4
"""Acts under way at a gateway at the same time."""
PIN_S: Final = 3600
_CALL_S: Final = 10.0
_ATTEMPT_S: Final = 5.0

log = get_logger(__name__)


class ActResult(NamedTuple):
    """What came of an act. `audited` False: the log could not take it; what is done is not undone by a full disk."""

    said: str
    audited: bool


class ConsoleActs:
    """Over the collector's connections, which it does not own."""

    def __init__(
        self, link: ConductorLink, master: MasterLink, clock: Clock, accounts: AccountsPlace
    ) -> None:
        """accounts: where the audit log is."""
        self._link, self._master, self._clock, self._accounts = link, master, clock, accounts
        self._under_way = 0

    async def do(self, act: ConsoleAct, who: str) -> ActResult:
        """Do it, and keep it.

        Raises LimitExceeded, NotFound for a prefix that is read no longer, and what conductor or master answered.
        """
        if self._under_way >= ACTS_MAX:
            raise LimitExceeded("Too many acts are under way on this console; try again.")
        self._under_way += 1
        result, said = "CANCELLED", ""
        try:
            said = await self._do(act)
            result = DONE
        except MooncacheError as error:
            result = error.name
            raise
        finally:
            self._under_way -= 1
            audited = await asyncio.shield(asyncio.to_thread(self._keep, act, who, result, said))
        return ActResult(said, audited)

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

    def _keep(self, act: ConsoleAct, who: str, result: str, said: str) -> bool:
        what, *arguments = act.command
        entry = AuditEntry(
            unix_ms=round(self._clock.wall_s() * 1e3),
            who=who,
            what=what,
            arguments=arguments,
            result=result,
            details={"by": "console", **({"said": said} if said else {})},
        )
        try:
            append(self._accounts, entry)
        except MooncacheError as error:
            log.error(Event.CONSOLE_ACT_NOT_AUDITED, act=what, who=who, error=error.message)
            return False
        return True
