"""`mooncache writers`: which processes wrote the blocks that the pool holds, over all nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mooncache.cli.common import HERE, AsJson, Where
from mooncache.errors import Unsupported
from mooncache.reporting.output import (
    EXIT_MISS,
    EXIT_OK,
    error_console,
    human_bytes,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from mooncache.client.options import ClientOptions
    from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2
    from mooncache.runtime.grpc_channel import GrpcChannel

UNKNOWN: Final = "(unknown)"
NodeWork = Callable[["GrpcChannel", "store_node_pb2.Fence"], Awaitable[Any]]
"""Takes a channel to a node, and under which authority and to whom a command is given."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What a node answered, or why it did not."""

    node_id: str
    answer: Any = None
    code: int = 0
    message: str = ""


@dataclass(slots=True)
class WriterRow:
    """A writer, summed over nodes."""

    writer_id: int
    instance: str = ""
    build: str = ""
    started_unix_s: int = 0
    block_count: int = 0
    memory_bytes: int = 0
    disk_block_count: int = 0
    disk_bytes: int = 0
    first_unix_s: int = 0
    last_unix_s: int = 0
    node_ids: list[str] = field(default_factory=list)
    quarantined: bool = False

    def add(self, node_id: str, found: store_node_pb2.WriterFigures) -> None:
        """Figures of one node more. The first name counts."""
        self.instance = self.instance or found.instance
        self.build = self.build or found.build
        self.started_unix_s = self.started_unix_s or found.started_unix_s
        self.block_count += found.block_count
        self.memory_bytes += found.memory_bytes
        self.disk_block_count += found.disk_block_count
        self.disk_bytes += found.disk_bytes
        firsts = [second for second in (self.first_unix_s, found.first_unix_s) if second]
        self.first_unix_s = min(firsts, default=0)
        self.last_unix_s = max(self.last_unix_s, found.last_unix_s)
        if found.block_count or found.disk_block_count:
            self.node_ids.append(node_id)

    @property
    def has_blocks(self) -> bool:
        return bool(self.node_ids)

    def document(self) -> dict[str, object]:
        """The row as JSON has it; the id is 16 hex digits, empty for blocks of no known writer."""
        return {
            "writer": writer_text(self.writer_id),
            "instance": self.instance,
            "build": self.build,
            "started_unix_s": self.started_unix_s,
            "block_count": self.block_count,
            "memory_bytes": self.memory_bytes,
            "disk_block_count": self.disk_block_count,
            "disk_bytes": self.disk_bytes,
            "first_unix_s": self.first_unix_s,
            "last_unix_s": self.last_unix_s,
            "node_ids": self.node_ids,
            "quarantined": self.quarantined,
        }


def writers(*, where: Where = HERE, json: AsJson = False) -> int:
    """List who wrote the blocks in the pool: instance, engine, blocks in memory and on disks, first and last write.

    Writers whose blocks are refused are listed, too; `mooncache quarantine` says why.

    Names are what the writers said of themselves when they connected. A block on a disk that is also in memory is
    counted in both columns, each copy for itself. Exit code 1 when a node did not answer. Needs the cluster token.

    For example:

        mooncache writers
    """
    answers = ask_every_node(where, get_writers(where.timeout_s))
    refused = _quarantined(where)
    rows = [row for row in merged(answers) if row.has_blocks or row.writer_id in refused]
    for row in rows:
        row.quarantined = row.writer_id in refused
    silent = [each for each in answers if each.code]
    if json:
        print_json(
            {
                "writers": [row.document() for row in rows],
                "silent_nodes": {each.node_id: each.message for each in silent},
            }
        )
    else:
        columns = ["id", "instance", "build", "blocks", "memory", "disk blocks", "disk", "first", "last"]
        print_table("", [*columns, "nodes", "state"], [_cells(row) for row in rows])
        say_silent(silent)
    return EXIT_MISS if silent else EXIT_OK


def _quarantined(where: Where) -> frozenset[int]:
    """The writers whose blocks are refused; none when the master is too old to know."""
    try:
        entries = where.ask_master(lambda link: get_quarantine(link, where.timeout_s))
    except Unsupported:
        return frozenset()
    return frozenset(entry.writer_id for entry in entries if not entry.released)


def say_silent(silent: Iterable[NodeAnswer]) -> None:
    """A line for each node that did not answer."""
    for each in silent:
        error_console.print(f"{each.node_id} did not answer: {each.message}", markup=False, soft_wrap=True)


def merged(answers: Sequence[NodeAnswer]) -> list[WriterRow]:
    """One row for each writer, the latest first and those without a number last."""
    rows: dict[int, WriterRow] = {}
    for each in answers:
        for found in each.answer.writers if each.answer is not None else ():
            rows.setdefault(found.writer_id, WriterRow(found.writer_id)).add(each.node_id, found)
    return sorted(rows.values(), key=lambda row: (row.writer_id == 0, -row.last_unix_s, row.writer_id))


def writer_text(writer_id: int) -> str:
    """A writer's number as people and JSON see it; empty for 0."""
    return f"{writer_id:016x}" if writer_id else ""


def time_text(unix_s: int) -> str:
    """A second of Unix time in this host's time zone; "-" for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else "-"


def _cells(row: WriterRow) -> tuple[object, ...]:
    return (
        writer_text(row.writer_id) or UNKNOWN,
        row.instance,
        row.build,
        row.block_count,
        human_bytes(row.memory_bytes),
        row.disk_block_count,
        human_bytes(row.disk_bytes),
        time_text(row.first_unix_s),
        time_text(row.last_unix_s),
        ", ".join(row.node_ids),
        "quarantined" if row.quarantined else "",
    )


def get_writers(timeout_s: float, tenant: str = "", keys: bytes = b"") -> NodeWork:
    """Ask a node for its writers, and those of `keys` of a tenant."""

    async def ask(channel: GrpcChannel, _: store_node_pb2.Fence) -> store_node_pb2.GetWritersResponse:
        from mooncache.proto.v1 import store_node_pb2

        asked = store_node_pb2.GetWritersRequest(tenant=tenant, keys=keys)
        return await channel.call("GetWriters", asked, store_node_pb2.GetWritersResponse, timeout_s)

    return ask


async def get_quarantine(link: Any, timeout_s: float) -> list[common_pb2.QuarantineEntry]:
    """All entries, the latest first. Raises Unsupported: the master is too old to know of any."""
    from mooncache.proto.v1 import master_pb2

    answer = await link.call(
        "GetQuarantine", master_pb2.GetQuarantineRequest(), master_pb2.GetQuarantineResponse, timeout_s
    )
    return sorted(answer.table.entries, key=lambda entry: (-entry.changed_wall_ms, entry.writer_id))


def ask_every_node(where: Where, work: NodeWork) -> list[NodeAnswer]:
    """`work` with a channel to each node that the master knows, all at once, in the order of their names.

    Raises:
        MasterUnavailable: no master answers.
        PermissionDenied: the token is not the cluster token.
    """
    from mooncache.client.options import ClientOptions

    options = ClientOptions.gather(**where.settings())
    status = where.ask_master(lambda link: _status(link, where.timeout_s))
    nodes = sorted((item.node for item in status.nodes), key=lambda node: node.node_id)

    async def ask() -> list[NodeAnswer]:
        return list(await asyncio.gather(*(_ask(options, status.term, node, work) for node in nodes)))

    return asyncio.run(ask())


async def _status(link: Any, timeout_s: float) -> master_pb2.GetStatusResponse:
    from mooncache.proto.v1 import master_pb2

    found: master_pb2.GetStatusResponse = await link.call(
        "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, timeout_s
    )
    return found


async def _ask(options: ClientOptions, term: int, node: common_pb2.NodeInfo, work: NodeWork) -> NodeAnswer:
    from mooncache.errors import MooncacheError, NodeUnavailable, PermissionDenied
    from mooncache.proto.v1 import store_node_pb2
    from mooncache.runtime.grpc_channel import GrpcChannel
    from mooncache.runtime.rpc import STORE_NODE_SERVICE
    from mooncache.runtime.tls import channel_credentials

    target = node.endpoints.grpc_target
    if not target:
        raise PermissionDenied("The master shows the nodes' control ports to the cluster token alone.")
    channel = GrpcChannel(
        target,
        STORE_NODE_SERVICE,
        token=options.token,
        credentials=channel_credentials(options.tls),
        unavailable_error=NodeUnavailable,
        server_name=options.tls.server_name,
    )
    try:
        fence = store_node_pb2.Fence(term=term, incarnation=node.incarnation)
        return NodeAnswer(node.node_id, await work(channel, fence))
    except PermissionDenied:
        raise
    except MooncacheError as error:
        return NodeAnswer(node.node_id, code=error.code, message=error.message)
    finally:
        await channel.close()


def origin_of(where: Where, tenant: str, key: bytes, node_ids: Sequence[str]) -> dict[str, object] | None:
    """Who wrote a block and when, as the first of `node_ids` that knows says; None: unknown, or not to be asked."""
    from mooncache.errors import MooncacheError

    try:
        answers = ask_every_node(where, get_writers(where.timeout_s, tenant, key))
    except MooncacheError:
        return None
    by_id = {each.node_id: each.answer for each in answers if each.answer is not None}
    names = {row.writer_id: row for row in merged(answers)}
    for node_id in node_ids:
        origins = by_id[node_id].origins if node_id in by_id else ()
        for origin in origins:
            if origin.writer_id:
                row = names.get(origin.writer_id, WriterRow(origin.writer_id))
                return {
                    "writer": writer_text(origin.writer_id),
                    "instance": row.instance,
                    "build": row.build,
                    "written_unix_s": origin.written_unix_s,
                }
    return None


def origin_text(origin: dict[str, Any]) -> str:
    """One line for people."""
    name = " ".join(part for part in (origin["instance"], origin["build"] and f"({origin['build']})") if part)
    return f"written by {name or UNKNOWN}, {origin['writer']}, {time_text(origin['written_unix_s'])}"
