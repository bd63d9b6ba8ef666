"""One look after another at the cluster, for all viewers of this gateway together.

While no page is open it only asks, twice a minute, how instances and nodes are, so that a page shows what was not well.

Each look asks the conductor and the master at the same time, each question with a deadline. A part that does not answer
is missing from the look, with a sentence; the rest is shown. Large clusters are looked at less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec
from google.protobuf.message import Message

from mooncache._version import __version__
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.master_link import MasterLink
from mooncache.errors import ConductorUnavailable, MooncacheError
from mooncache.gateway.console.messages import (
    conductor_view,
    hits_of_unlimited,
    instance_counters,
    instance_rows,
    network_view,
    node_counters,
    node_rows,
    prefix_rows,
    repair_view,
    task_rows,
    tenant_shares,
)
from mooncache.gateway.console.viewers import Topic, Viewers
from mooncache.gateway.core.console_book import DecisionBook, figures, series
from mooncache.gateway.core.console_flows import CounterRates, flows, tenant_view
from mooncache.gateway.core.console_incidents import SERVICE, IncidentBook
from mooncache.gateway.core.console_money import ConsoleMoney
from mooncache.prices.core.request_cost import ENDED
from mooncache.prices.engines import engine_hours
from mooncache.proto.v1 import conductor_pb2, master_pb2
from mooncache.runtime.channel import Response
from mooncache.runtime.clock import Clock

LOOK_S: Final = 2.0
_LOOK_S_PER_INSTANCE: Final = 0.005
_LINGER_S: Final = 30.0  # a page that is loaded again finds the last look
_WATCH_S: Final = 30.0  # between two looks without a page
_CALL_S: Final = 2.0
_ATTEMPT_S: Final = 1.0
_TENANTS_S: Final = 10.0  # between two questions that the master passes on to every node
_PAGE: Final = 64
_FIRST_PAGE: Final = 256
_PAGES_MAX: Final = 4  # of one look; a look that misses decisions says so
_WINDOW_S: Final = 900.0
_STEPS: Final = 30
_REQUESTS_MAX: Final = 250
_PROBLEMS_MAX: Final = 12
_TASKS: Final = 20  # the newest ones
_READY: Final = "ready"
_ACTIVE: Final = "active"


@dataclass(slots=True)
class _ClusterLook:
    """What the parts answered this time; None: nothing, and `silent` says why."""

    conductor: dict[str, Any] | None = None
    instances: list[dict[str, Any]] | None = None
    master: master_pb2.GetStatusResponse | None = None
    tenants: master_pb2.ListTenantsResponse | None = None
    tasks: list[dict[str, Any]] | None = None
    repair: dict[str, Any] | None = None
    prefixes: conductor_pb2.ListHotPrefixesResponse | None = None
    with_ways: bool = False  # the master was asked for the ways between nodes
    skipped: bool = False  # more decisions were made than a look reads
    silent: dict[str, str] = field(default_factory=dict)


class Collector:
    """Looks while there are viewers, and publishes what it sees. Owns its connections; `close` them.

    link: of its own, so that what it asks never waits before a question of a request. money: prices requests; None:
    without a price book. `gateway_id`: as pages show it.
    """

    def __init__(
        self,
        link: ConductorLink,
        master: MasterLink,
        clock: Clock,
        viewers: Viewers,
        money: ConsoleMoney | None = None,
    ) -> None:
        self._link, self._master, self._clock, self._viewers = link, master, clock, viewers
        self.gateway_id = ""
        self._money, self._book = money, DecisionBook(money=money)
        self._tenants: master_pb2.ListTenantsResponse | None = None
        self._tenants_at_s = float("-inf")
        self._alone_since_s: float | None = float("-inf")  # without viewers since ever
        self._node_rates, self._engine_rates = CounterRates(), CounterRates()
        self._incidents = IncidentBook(clock.wall_s())

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            if not self._viewers.wanted.is_set() and self._lingered():
                self._viewers.forget()
                await self._watch_alone()
                self._alone_since_s = None
            look = await self.look()
            self._viewers.publish(self.events(look))
            await self._clock.sleep(max(LOOK_S, len(look.instances or ()) * _LOOK_S_PER_INSTANCE))

    async def _watch_alone(self) -> None:
        """Until a page is open: see what is not well."""
        while not self._viewers.wanted.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_S):
                    await self._viewers.wanted.wait()
                return
            look = _ClusterLook()
            await asyncio.gather(self._instances(look), self._nodes(look))
            self._note_incidents(look)

    def _note_incidents(self, look: _ClusterLook) -> None:
        at_s, book = self._clock.wall_s(), self._incidents
        book.take(at_s, "instance", look.instances)
        book.take(at_s, "node", node_rows(look.master, None) if look.master is not None else None)
        silent = {"master" if part == "pool" else "conductor": text for part, text in look.silent.items()}
        book.take(
            at_s, SERVICE, [{"id": each, "state": "silent", "reason": text} for each, text in silent.items()]
        )

    async def close(self) -> None:
        """Let go of the connections."""
        await self._link.close()
        await self._master.close()

    async def decision(self, name: str, policy: str) -> str:
        """The record of a decision as JSON, with what another policy would have done; `cost` with a price book.

        Raises MooncacheError.
        """
        request = conductor_pb2.GetDecisionRequest(id=name, policy=policy)
        answer = await self._link.call("GetDecision", request, conductor_pb2.GetDecisionResponse, _CALL_S)
        text = str(answer.record_json)
        return text if self._money is None else await self._with_cost(text, self._money)

    async def _with_cost(self, text: str, money: ConsoleMoney) -> str:
        record = json.loads(text)
        if not isinstance(record, dict) or record.get("state") not in ENDED:
            return text
        await self._instances(_ClusterLook())  # which do the work; no page with a look may be open
        return msgspec.json.encode({**record, "cost": money.described(record)}).decode()

    async def look(self) -> _ClusterLook:
        """Ask all parts at once."""
        look = _ClusterLook()
        await asyncio.gather(
            self._conductor(look),
            self._engines_and_requests(look),
            self._pool(look),
            self._copies(look),
            self._prefixes(look),
        )
        self._note_incidents(look)
        return look

    async def _engines_and_requests(self, look: _ClusterLook) -> None:
        if self._money is None:
            await asyncio.gather(self._instances(look), self._decisions(look))
        else:  # a request is priced by the instances that did it, so those have to be known
            await self._instances(look)
            await self._decisions(look)

    def _lingered(self) -> bool:
        """Whether there has been no viewer for a while."""
        if self._viewers.wanted.is_set():
            self._alone_since_s = None
            return False
        now_s = self._clock.now_s()
        if self._alone_since_s is None:
            self._alone_since_s = now_s
        return now_s - self._alone_since_s >= _LINGER_S

    async def _ask(self, method: str, request: Message, response_class: type[Response]) -> Response:
        return await self._link.call(method, request, response_class, _CALL_S)

    async def _conductor(self, look: _ClusterLook) -> None:
        try:
            answer = await self._ask(
                "GetConductorStatus",
                conductor_pb2.GetConductorStatusRequest(),
                conductor_pb2.GetConductorStatusResponse,
            )
        except MooncacheError as error:
            # One of an earlier version has no such call; the others say what is wrong with it.
            if isinstance(error, ConductorUnavailable):
                look.silent["conductor"] = error.message
            return
        look.conductor = conductor_view(answer)

    async def _instances(self, look: _ClusterLook) -> None:
        request = conductor_pb2.ListInstancesRequest(passports_apart=True)
        try:
            answer = await self._ask("ListInstances", request, conductor_pb2.ListInstancesResponse)
        except MooncacheError as error:
            look.silent["instances"] = error.message
            return
        look.instances = instance_rows(answer.instances)
        self._engine_rates.take(self._clock.now_s(), instance_counters(answer.instances))
        if self._money is not None:
            for view in answer.instances:
                if 0 < view.passport <= len(answer.passports):
                    view.instance.passport_json = answer.passports[view.passport - 1]
            hours = engine_hours((view.instance for view in answer.instances), self._money.book)
            self._money.know(hours)

    async def _decisions(self, look: _ClusterLook) -> None:
        """The newest decisions, then those that ran when they were looked at last."""
        book = self._book
        first = not len(book)
        count, before, known = (_FIRST_PAGE if first else _PAGE), "", False
        try:
            for _ in range(_PAGES_MAX):
                records = await self._page(before, count)
                known = book.take(records) < len(records) or not records
                if known:
                    break
                before = str(records[-1]["decision_id"])
            look.skipped = not known and not first
            before = book.next_look(_PAGE)
            if before:
                records = await self._page(before, _PAGE)
                book.take(records)
                if not records:
                    book.forget_open(before)
        except MooncacheError as error:
            look.silent["requests"] = error.message

    async def _page(self, before: str, count: int) -> list[dict[str, Any]]:
        request = conductor_pb2.ListDecisionsRequest(before=before, count=count)
        answer = await self._ask("ListDecisions", request, conductor_pb2.ListDecisionsResponse)
        return [record for text in answer.records_json if isinstance(record := json.loads(text), dict)]

    async def _nodes(self, look: _ClusterLook) -> None:
        try:
            request = master_pb2.GetStatusRequest(with_latencies=look.with_ways)
            look.master = await self._ask_master("GetStatus", request, master_pb2.GetStatusResponse)
        except MooncacheError as error:
            look.silent["pool"] = error.message

    async def _pool(self, look: _ClusterLook) -> None:
        look.with_ways = self._viewers.watch(Topic.NETWORK)
        await self._nodes(look)
        now_s = self._clock.now_s()
        if look.master is None:
            self._tenants = None
        elif now_s - self._tenants_at_s >= _TENANTS_S:
            self._tenants_at_s, self._tenants = now_s, None
            with contextlib.suppress(MooncacheError):
                self._tenants = await self._ask_master(
                    "ListTenants", master_pb2.ListTenantsRequest(), master_pb2.ListTenantsResponse
                )
                self._node_rates.take(now_s, node_counters(self._tenants))
        look.tenants = self._tenants

    async def _prefixes(self, look: _ClusterLook) -> None:
        """The prefixes that are read most; a conductor of an earlier version has no such call."""
        with contextlib.suppress(MooncacheError):
            look.prefixes = await self._ask(
                "ListHotPrefixes",
                conductor_pb2.ListHotPrefixesRequest(),
                conductor_pb2.ListHotPrefixesResponse,
            )

    async def _copies(self, look: _ClusterLook) -> None:
        """What is moved and copied now. Without an answer it is not shown; `_pool` says why the master is silent."""
        with contextlib.suppress(MooncacheError):
            listed = await self._ask_master(
                "ListTasks", master_pb2.ListTasksRequest(page_size=_TASKS), master_pb2.ListTasksResponse
            )
            look.tasks = task_rows(listed.tasks)
            look.repair = repair_view(
                await self._ask_master(
                    "GetRepair", master_pb2.GetRepairRequest(), master_pb2.GetRepairResponse
                )
            )

    async def _ask_master(self, method: str, request: Message, response_class: type[Response]) -> Response:
        return await self._master.call(method, request, response_class, _CALL_S, attempt_s=_ATTEMPT_S)

    def events(self, look: _ClusterLook) -> dict[Topic, bytes]:
        """The look as an event for each topic."""
        nodes = node_rows(look.master, look.tenants) if look.master is not None else None
        now_s = self._clock.wall_s()
        head = {
            "at_s": now_s,
            "version": __version__,
            "gateway": self.gateway_id,
            "silent": look.silent,
        }
        requests = [asdict(row) for row in self._book.newest(_REQUESTS_MAX)]
        documents: dict[Topic, dict[str, Any]] = {
            Topic.OVERVIEW: self._overview(look, nodes, now_s),
            Topic.REQUESTS: {"requests": requests, "skipped": look.skipped},
            Topic.POOL: self._pool_page(look, nodes),
            Topic.INSTANCES: {"instances": look.instances, "nodes": nodes},
            Topic.NETWORK: network_view(look.master) if look.master is not None and look.with_ways else {},
            Topic.PREFIXES: {
                "prefixes": prefix_rows(look.prefixes.prefixes) if look.prefixes is not None else None,
                "counted": look.prefixes is not None and look.prefixes.counted,
            },
        }
        return {topic: event_of({**head, **document}) for topic, document in documents.items()}

    def _pool_page(self, look: _ClusterLook, nodes: list[dict[str, Any]] | None) -> dict[str, Any]:
        rates = self._node_rates.rates() if look.tenants is not None else {}
        for row in nodes or ():
            of_node = rates.get(row["id"], {})
            row |= {"stored_per_s": of_node.get("stored_bytes"), "read_per_s": of_node.get("hit_bytes")}
        roles = {row["id"]: row["role"] for row in look.instances or ()}
        return {
            "nodes": nodes,
            "tasks": look.tasks,
            "repair": look.repair,
            "tenants": tenant_view(tenant_shares(look.tenants)) if look.tenants is not None else None,
            "flows": [each._asdict() for each in flows(rates, self._engine_rates.rates(), roles)],
        }

    def _overview(
        self, look: _ClusterLook, nodes: list[dict[str, Any]] | None, now_s: float
    ) -> dict[str, Any]:
        since_s = now_s - _WINDOW_S
        rows = self._book.within(since_s)
        begins_s = self._book.begins_s()
        # A full book may begin within the window: then the figures are those of a shorter one.
        window_s = _WINDOW_S if len(rows) < len(self._book) or begins_s is None else now_s - begins_s
        said = figures(rows)
        window_s = min(max(window_s, 1.0), _WINDOW_S)
        return {
            "window_s": window_s,
            "figures": said,
            "series": series(rows, since_s, _WINDOW_S / _STEPS, _STEPS),
            "currency": self._money.book.cost.currency if self._money is not None else None,
            "price_holes": self._money.book.holes() if self._money is not None else [],
            "paybacks": self._paybacks(nodes, said, window_s),
            "skipped": look.skipped,
            "conductor": look.conductor,
            "instances": _counts(look.instances, "state", "role"),
            "troubled": _troubled(look.instances, _READY),
            "nodes": _counts(nodes, "state"),
            "troubled_nodes": _troubled(nodes, _ACTIVE),
            "pool": _pool_sums(look.master, look.tenants),
            "incidents": self._incidents.newest(),
            "incidents_since_s": self._incidents.begun_s,
        }

    def _paybacks(
        self, nodes: list[dict[str, Any]] | None, said: dict[str, Any], window_s: float
    ) -> list[dict[str, Any]]:
        """Whether space of the pool pays for itself; nothing without a price book, or when it is not known."""
        if self._money is None or nodes is None or said["saved_cost"] is None:
            return []
        return self._money.paybacks(nodes, said["saved_dram_cost"], said["saved_ssd_cost"], window_s)


def event_of(document: dict[str, Any]) -> bytes:
    """A server-sent event; JSON has no raw line break, so one line holds it."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _counts(rows: Sequence[dict[str, Any]] | None, *names: str) -> dict[str, Any] | None:
    """How many rows there are, and of each value of these columns."""
    if rows is None:
        return None
    return {
        "count": len(rows),
        **{name: dict(sorted(Counter(row[name] for row in rows).items())) for name in names},
    }


def _troubled(rows: Sequence[dict[str, Any]] | None, well: str) -> list[dict[str, Any]]:
    """The first rows that are in another state."""
    found = [
        {"id": row["id"], "state": row["state"], "reason": row.get("reason") or row.get("remark") or ""}
        for row in rows or ()
        if row["state"] != well
    ]
    return found[:_PROBLEMS_MAX]


def _pool_sums(
    status: master_pb2.GetStatusResponse | None, tenants: master_pb2.ListTenantsResponse | None
) -> dict[str, Any] | None:
    if status is None:
        return None
    return {
        "used_bytes": sum(item.used_bytes for item in status.nodes),
        "capacity_bytes": sum(item.node.capacity_bytes for item in status.nodes),
        "blocks": status.block_count,
        "master": status.master_id,
        "complete": status.directory_complete,
        "hits_of_unlimited": hits_of_unlimited(tenants.nodes) if tenants is not None else None,
    }
