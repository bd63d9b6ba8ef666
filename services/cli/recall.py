"""`mooncache recall`: remove what a writer wrote from every node, in memory and on disks, with a receipt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from mooncache.cli.accounts import moment_s
from mooncache.cli.acts import note
from mooncache.cli.common import HERE, AsJson, Where, seconds_of
from mooncache.cli.writers import (
    NodeAnswer,
    NodeWork,
    WriterRow,
    ask_every_node,
    get_writers,
    merged,
    writer_text,
)
from mooncache.errors import DeadlineExceeded, Internal, InvalidArgument, NotFound, code_name
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, human_bytes, print_json

if TYPE_CHECKING:
    from mooncache.proto.v1 import store_node_pb2
    from mooncache.runtime.grpc_channel import GrpcChannel

_PASSES_MAX: Final = 8
_PAUSE_S: Final = 0.25
_LEAST_S: Final = 1.0
_COUNTS: Final = (
    "block_count",
    "memory_bytes",
    "held_block_count",
    "disk_block_count",
    "disk_bytes",
    "failed_block_count",
)


def recall(
    *,
    writer: Annotated[
        str, Parameter(help="Number of a writer (16 hex digits), or its instance's name: all that bore it.")
    ],
    since: Annotated[
        str, Parameter(help='Only blocks written from then on: "2h" ago, or "2027-01-31T18:00" (UTC).')
    ] = "",
    until: Annotated[str, Parameter(help="Only blocks written until then, given as for --since.")] = "",
    refuse: Annotated[
        str, Parameter(help='For so long what these writers write is not taken, as "1h"; at most a day.')
    ] = "",
    dry_run: Annotated[bool, Parameter(negative=(), help="Count, and remove nothing.")] = False,
    yes: Annotated[bool, Parameter(negative=(), help="Do it; without this nothing is removed.")] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Remove what a writer wrote from memory, disks and shared logs of every node, pinned or not, and print a receipt.

    Nodes are asked until none finds anything. The exit code is 0 when all nodes have done all of it, and 1 when one did
    not answer, a disk did not confirm a removal, or blocks were still found at the time limit. Then ask again.

    A removal lasts over restarts. Blocks whose writer is unknown (an older client, a full table) are in no recall.

    For example:

        mooncache recall --writer vllm-7 --since 2h --dry-run

        mooncache recall --writer 53a0c1d29e774b18 --yes --timeout 1min --json
    """
    if not yes and not dry_run:
        raise InvalidArgument(
            f"This removes what {writer} wrote for good. Add --yes to do it, or --dry-run to count."
        )
    now_s = int(time.time())
    request = {
        "since_unix_s": moment_s(since, now_s, "--since", past=True) if since else 0,
        "until_unix_s": moment_s(until, now_s, "--until", past=True) if until else 0,
        "refuse_s": round(seconds_of(refuse, "--refuse")) if refuse else 0,
        "dry_run": dry_run,
    }
    deadline_s = time.monotonic() + where.timeout_s
    answers = ask_every_node(where, get_writers(where.timeout_s))
    chosen = choose(merged(answers), writer)
    receipt = _recall(where, chosen, request, deadline_s)
    note(
        **{name: str(receipt[name]) for name in ("block_count", "disk_block_count", "complete")},
        writers=" ".join(each["writer"] for each in receipt["writers"]),
    )
    if json:
        print_json(receipt)
    else:
        _print(receipt)
    return EXIT_OK if receipt["complete"] else EXIT_MISS


def choose(rows: Sequence[WriterRow], wanted: str) -> list[WriterRow]:
    """The writers with that number, else those whose instance has that name.

    Raises:
        NotFound: no node knows such a writer.
    """
    known = [row for row in rows if row.writer_id]
    found = [row for row in known if writer_text(row.writer_id) == wanted.lower()]
    found = found or [row for row in known if row.instance == wanted]
    if not found:
        raise NotFound(
            f"No node knows a writer {wanted!r}. `mooncache writers` lists them; a node that did not answer "
            "may know more."
        )
    return found


def _recall(
    where: Where, chosen: Sequence[WriterRow], request: dict[str, Any], deadline_s: float
) -> dict[str, Any]:
    """The receipt, after as many passes over all nodes as it takes until none finds anything."""
    nodes: dict[str, dict[str, Any]] = {}
    passes, is_done = 0, False
    last: list[NodeAnswer] = []
    while not is_done:
        left_s = max(_LEAST_S, deadline_s - time.monotonic())
        last = ask_every_node(where, _recall_writers([row.writer_id for row in chosen], request, left_s))
        found = sum(_add(nodes, each) for each in last)
        passes += 1
        is_done = (
            request["dry_run"]
            or found == 0
            or passes >= _PASSES_MAX
            or time.monotonic() + _PAUSE_S >= deadline_s
        )
        if not is_done:
            time.sleep(_PAUSE_S)
    rows = [nodes[node_id] for node_id in sorted(nodes)]
    if found and not request["dry_run"]:
        for row in rows:
            row["code"] = row["code"] or DeadlineExceeded.code
    totals = {name: sum(row[name] for row in rows) for name in _COUNTS}
    return {
        "writers": [
            {"writer": writer_text(row.writer_id), "instance": row.instance, "build": row.build}
            for row in chosen
        ],
        **request,
        **totals,
        "passes": passes,
        "complete": all(not row["code"] for row in rows) and bool(rows),
        "ended_wall_ms": round(time.time() * 1e3),
        "nodes": [{**row, "code": code_name(row["code"]) if row["code"] else "OK"} for row in rows],
    }


def _add(nodes: dict[str, dict[str, Any]], each: NodeAnswer) -> int:
    """Add what a node answered in one pass; returns how many blocks it found. Its last answer decides of the code."""
    row = nodes.setdefault(
        each.node_id, {"node_id": each.node_id, "code": 0, "message": "", **dict.fromkeys(_COUNTS, 0)}
    )
    row["code"], row["message"] = each.code, each.message
    if each.answer is None:
        return 0
    receipt = each.answer.receipt
    for name in _COUNTS:
        row[name] += getattr(receipt, name)
    row["code"] = receipt.code
    if row["failed_block_count"] and not row["code"]:
        row["code"] = Internal.code
    return int(receipt.block_count + receipt.disk_block_count)


def _recall_writers(writer_ids: list[int], request: dict[str, Any], timeout_s: float) -> NodeWork:
    async def ask(channel: GrpcChannel, fence: store_node_pb2.Fence) -> store_node_pb2.RecallWritersResponse:
        from mooncache.proto.v1 import store_node_pb2

        asked = store_node_pb2.RecallWritersRequest(writer_ids=writer_ids, fence=fence, **request)
        return await channel.call("RecallWriters", asked, store_node_pb2.RecallWritersResponse, timeout_s)

    return ask


def _print(receipt: dict[str, Any]) -> None:
    done = "would remove" if receipt["dry_run"] else "removed"
    for row in receipt["nodes"]:
        text = (
            f"{row['node_id']}: {done} {row['block_count']} blocks in memory ({human_bytes(row['memory_bytes'])}) "
            f"and {row['disk_block_count']} on disks alone ({human_bytes(row['disk_bytes'])})"
        )
        if row["held_block_count"]:
            text += f"; {row['held_block_count']} of them were in use, their memory is freed by the last user"
        if row["failed_block_count"]:
            text += f"; of {row['failed_block_count']} no disk confirmed the removal: a restart may bring them back"
        if row["code"] != "OK":
            text += f"; NOT COMPLETE: {row['code']} {row['message']}".rstrip()
        console.print(text, markup=False, soft_wrap=True)
    if not receipt["complete"]:
        console.print("the receipt is not clean: ask again when every node answers", style="yellow")
