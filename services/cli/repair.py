"""`mooncache repair status`: whether blocks have their copies, how far the repair is, what moves to emptier nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mooncache.cli.common import HERE, AsJson, Where
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, human_age, human_bytes, print_json
from mooncache.runtime.enum_words import word_of

if TYPE_CHECKING:
    from mooncache.client.master_link import MasterLink
    from mooncache.proto.v1 import master_pb2

_POLL_S = 0.5
_AT_REST = ("whole", "off")
_ATTEMPT_S = 5.0


def status(
    *,
    wait: Annotated[
        bool, Parameter(negative=(), help="Wait until every block has its copies, and show how far it is.")
    ] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Show whether blocks have the copies that they should have: what is missing, its rate, how long still.

    Below it: whether blocks move to emptier nodes, because a node came or went.

    With --wait the exit code is 0 when nothing is missing, 1 when the time limit came first.

    For example:

        mooncache repair status

        mooncache repair status --wait --timeout 10min
    """
    document = where.ask_master(lambda link: _follow(link, where.timeout_s, wait=wait, quiet=json))
    if json:
        print_json(document)
    else:
        for line in repair_lines(document):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return EXIT_MISS if wait and document["state"] not in _AT_REST else EXIT_OK


def repair_document(found: master_pb2.GetRepairResponse) -> dict[str, Any]:
    """GetRepairResponse as a plain document."""
    from mooncache.errors import OK, code_name
    from mooncache.proto.v1 import master_pb2

    return {
        "state": word_of(master_pb2.RepairState, found.state),
        "wait_s": found.wait_ms / 1000.0,
        "short_block_count": found.short_block_count,
        "close_block_count": found.close_block_count,
        "left_bytes": found.left_bytes,
        "estimate_s": found.estimate_ms / 1000.0,
        "bytes_per_s": found.bytes_per_s,
        "limit_bytes_per_s": found.limit_bytes_per_s,
        "queued_block_count": found.queued_block_count,
        "steps_in_flight": found.steps_in_flight,
        "resting_block_count": found.resting_block_count,
        "resting_code": "" if found.resting_code == OK else code_name(found.resting_code),
        "copied_bytes": found.copied_bytes,
        "copied_block_count": found.copied_block_count,
        "trimmed_count": found.trimmed_count,
        "default_replicas": found.default_replicas,
        "tenant_replicas": dict(sorted(found.tenant_replicas.items())),
        "spread_over": found.spread_over,
        "rebalance": _rebalance_document(found.rebalance),
    }


def _rebalance_document(found: master_pb2.RebalanceStatus) -> dict[str, Any]:
    from mooncache.proto.v1 import master_pb2

    return {
        "state": word_of(master_pb2.RebalanceState, found.state),
        "wait_s": found.wait_ms / 1000.0,
        "left_bytes": found.left_bytes,
        "estimate_s": found.estimate_ms / 1000.0,
        "bytes_per_s": found.bytes_per_s,
        "limit_bytes_per_s": found.limit_bytes_per_s,
        "moved_bytes": found.moved_bytes,
        "moved_block_count": found.moved_block_count,
        "skipped_block_count": found.skipped_block_count,
        "steps_in_flight": found.steps_in_flight,
        "fullest_percent": found.fullest_percent,
        "emptiest_percent": found.emptiest_percent,
    }


def repair_lines(document: dict[str, Any]) -> list[str]:
    """The document as lines for people."""
    own = ", ".join(f"{name} {count}" for name, count in document["tenant_replicas"].items())
    copies = f"copies {document['default_replicas']}{f' ({own})' if own else ''}"
    lines = [f"repair    {_state_text(document)}", f"          {copies}, apart by {document['spread_over']}"]
    if document["left_bytes"]:
        lines.append(
            f"          {document['short_block_count']} blocks short, {document['close_block_count']} too close: "
            f"{human_bytes(document['left_bytes'])} left"
        )
    if document["copied_block_count"] or document["trimmed_count"]:
        lines.append(
            f"          since this master leads: {document['copied_block_count']} copies made "
            f"({human_bytes(document['copied_bytes'])}), {document['trimmed_count']} dropped"
        )
    if document["resting_block_count"]:
        lines.append(
            f"          {document['resting_block_count']} blocks are tried again later: {document['resting_code']}"
        )
    return [*lines, *_rebalance_lines(document["rebalance"])]


def _rebalance_lines(document: dict[str, Any]) -> list[str]:
    lines = [f"rebalance {_rebalance_text(document)}"]
    if document["moved_block_count"]:
        lines.append(
            f"          since this master leads: {document['moved_block_count']} blocks moved "
            f"({human_bytes(document['moved_bytes'])}), {document['skipped_block_count']} could not move"
        )
    return lines


def _rebalance_text(document: dict[str, Any]) -> str:
    fills = f"nodes are {document['emptiest_percent']} to {document['fullest_percent']} % full"
    match document["state"]:
        case "at_rest":
            return f"at rest: {fills}"
        case "waiting":
            waits = human_age(document["wait_s"]) if document["wait_s"] else "for a repair or a task"
            return f"waits {waits}: a node came or went; {fills}"
        case "moving":
            return f"{_pace_text(document)}; {fills}"
        case "off":
            return "off: the limit is 0"
    return "not known: the master is of a former version"


def _state_text(document: dict[str, Any]) -> str:
    match document["state"]:
        case "off":
            return "off: no blocks are kept in several copies, or the limit is 0"
        case "whole":
            return "every block has its copies"
        case "waiting":
            return f"waits {human_age(document['wait_s'])} for nodes to come back"
        case "blocked":
            return f"blocked: {human_bytes(document['left_bytes'])} cannot be copied now"
    return _pace_text(document)


def _pace_text(document: dict[str, Any]) -> str:
    return (
        f"{human_bytes(document['left_bytes'])} left, {human_bytes(document['bytes_per_s'])}/s "
        f"of {human_bytes(document['limit_bytes_per_s'])}/s, about {human_age(document['estimate_s'])}"
    )


async def _ask(link: MasterLink, timeout_s: float) -> dict[str, Any]:
    from mooncache.proto.v1 import master_pb2

    return repair_document(
        await link.call(
            "GetRepair",
            master_pb2.GetRepairRequest(),
            master_pb2.GetRepairResponse,
            timeout_s,
            attempt_s=_ATTEMPT_S,
        )
    )


async def _follow(link: MasterLink, timeout_s: float, *, wait: bool, quiet: bool) -> dict[str, Any]:
    """The document; with `wait` the one when nothing is missing, or the time is over."""
    from rich.progress import BarColumn, Progress, TextColumn

    from mooncache.runtime.clock import SystemClock

    document = await _ask(link, timeout_s)
    if not wait:
        return document
    clock, end_s = SystemClock(), time.monotonic() + timeout_s
    bar = Progress(TextColumn("repair"), BarColumn(), TextColumn("{task.description}"), console=console)
    bar.disable = quiet
    with bar:
        shown = bar.add_task("", total=None)
        begun_bytes = document["copied_bytes"]
        while document["state"] not in _AT_REST and (left_s := end_s - time.monotonic()) > 0:
            done = document["copied_bytes"] - begun_bytes
            total = done + document["left_bytes"]
            bar.update(shown, completed=done, total=total or None, description=_state_text(document))
            await clock.sleep(min(_POLL_S, left_s))
            document = await _ask(link, max(left_s, _POLL_S))
    return document
