"""`mooncache quarantine ls | add | release`: whose blocks the pool refuses and why, by hand or as engines found it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mooncache.cli.acts import note
from mooncache.cli.common import HERE, AsJson, Where
from mooncache.cli.recall import choose
from mooncache.cli.writers import (
    WriterRow,
    ask_every_node,
    get_quarantine,
    get_writers,
    merged,
    time_text,
    writer_text,
)
from mooncache.errors import InvalidArgument, NotFound
from mooncache.reporting.output import EXIT_OK, console, print_json, print_table

if TYPE_CHECKING:
    from mooncache.client.master_link import MasterLink
    from mooncache.proto.v1 import common_pb2

_BY_HAND = "by an operator"
Name = Annotated[
    str, Parameter(help="Number of a writer (16 hex digits), or its instance's name: all that bear it.")
]
Reason = Annotated[str, Parameter(help="Why, for the list.")]


def ls(*, where: Where = HERE, json: AsJson = False) -> int:
    """List the writers whose blocks are refused because others computed different ones, and those that were released.

    Needs the cluster token.

    For example:

        mooncache quarantine ls
    """
    rows = [
        _document(entry) for entry in where.ask_master(lambda link: get_quarantine(link, where.timeout_s))
    ]
    if json:
        print_json({"writers": rows})
        return EXIT_OK
    columns = ["writer", "instance", "build", "state", "since", "found by", "reason"]
    print_table("", columns, [_cells(row) for row in rows])
    return EXIT_OK


def add(
    writer: Name,
    /,
    *,
    reason: Reason = "",
    yes: Annotated[bool, Parameter(negative=(), help="Do it: what it wrote is removed for good.")] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Quarantine a writer: what it wrote is removed from every node, and what it writes is not taken.

    That holds over restarts of masters and nodes until the writer is released. A process that starts anew is a new
    writer. Needs the cluster token.

    For example:

        mooncache quarantine add vllm-7 --reason "wrong driver" --yes
    """
    if not yes:
        raise InvalidArgument(f"This removes what {writer} wrote for good. Add --yes to do it.")
    chosen = choose(merged(ask_every_node(where, get_writers(where.timeout_s))), writer)
    return _change(where, chosen, released=False, reason=reason, json=json)


def release(writer: Name, /, *, reason: Reason = "", where: Where = HERE, json: AsJson = False) -> int:
    """Lift a writer's quarantine, on every node: what it writes from now on is taken. Needs the cluster token.

    For example:

        mooncache quarantine release 53a0c1d29e774b18 --reason "driver replaced"
    """
    entries = where.ask_master(lambda link: get_quarantine(link, where.timeout_s))
    chosen = [
        WriterRow(entry.writer_id, entry.instance, entry.build)
        for entry in entries
        if not entry.released and writer in {writer_text(entry.writer_id), entry.instance}
    ]
    if not chosen:
        raise NotFound(
            f"No writer {writer!r} is quarantined. `mooncache quarantine ls` lists those that are."
        )
    return _change(where, chosen, released=True, reason=reason, json=json)


def _change(where: Where, chosen: Sequence[WriterRow], *, released: bool, reason: str, json: bool) -> int:
    changed = {
        writer_text(row.writer_id): where.ask_master(_set(where, row, released=released, reason=reason))
        for row in chosen
    }
    note(writers=" ".join(changed))
    if json:
        print_json({"released": released, "changed": changed})
        return EXIT_OK
    for number, nodes in changed.items():
        what = "released" if released else "quarantined"
        console.print(
            f"{number}: {what} on {', '.join(nodes) or 'no node yet'}", markup=False, highlight=False
        )
    return EXIT_OK


def _set(where: Where, row: WriterRow, *, released: bool, reason: str) -> Any:
    async def ask(link: MasterLink) -> list[str]:
        from mooncache.proto.v1 import master_pb2

        asked = master_pb2.SetQuarantineRequest(
            writer_id=row.writer_id, instance=row.instance, build=row.build, released=released, reason=reason
        )
        answer = await link.call("SetQuarantine", asked, master_pb2.SetQuarantineResponse, where.timeout_s)
        return list(answer.node_ids)

    return ask


def _document(entry: common_pb2.QuarantineEntry) -> dict[str, Any]:
    return {
        "writer": writer_text(entry.writer_id),
        "instance": entry.instance,
        "build": entry.build,
        "released": entry.released,
        "changed_unix_s": entry.changed_wall_ms // 1000,
        "verifiers": list(entry.verifiers),
        "reason": entry.reason,
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["writer"],
        row["instance"],
        row["build"],
        "released" if row["released"] else "quarantined",
        time_text(row["changed_unix_s"]),
        ", ".join(row["verifiers"]) or _BY_HAND,
        row["reason"],
    )
