"""`mooncache node restart`: end a store node of this machine's cluster, and wait until it serves again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path  # noqa: F401  (the fields of Where name it, and the command line reads them here)
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mooncache.cli.common import WHERE, AsJson, Where
from mooncache.errors import DeadlineExceeded, InvalidArgument, MooncacheError
from mooncache.reporting.output import EXIT_OK, console, print_json

if TYPE_CHECKING:
    from mooncache.client.master_link import MasterLink
    from mooncache.proto.v1 import master_pb2

_POLL_S = 0.05


@Parameter(name="*")
@dataclass(frozen=True)
class RestartWhere(Where):
    """The same with a longer limit: a node that is asked to end first finishes its calls, and then starts again."""

    timeout: Annotated[str, Parameter(group=WHERE, help='Time limit, for example "30s" or "2min".')] = "1min"


RESTART_HERE = RestartWhere()


def restart(
    node_id: Annotated[str, Parameter(help="Name of the node, as `mooncache status` shows it.")],
    /,
    *,
    kill: Annotated[
        bool, Parameter(negative=(), help="End it with SIGKILL instead of asking it to end.")
    ] = False,
    where: RestartWhere = RESTART_HERE,
    json: AsJson = False,
) -> int:
    """Restart a store node of the cluster that `mooncache up` runs here, and wait until it is active again.

    With `mooncache up --keep-memory` it comes back with its blocks. Where systemd or Kubernetes runs a node, restart
    it there.

    For example:

        mooncache node restart node-1 --timeout 5min
    """
    pid = _pid_of(node_id, where)
    before = where.ask_master(lambda link: _look(link, node_id, where.timeout_s))
    began_s = time.monotonic()
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
    after = where.ask_master(lambda link: _await_next(link, node_id, before, where.timeout_s))
    document = {
        "node_id": node_id,
        "seconds": round(time.monotonic() - began_s, 3),
        "blocks_before": before.block_count if before is not None else None,
        "blocks": after.directory_block_count,
    }
    if json:
        print_json(document)
    else:
        had = "" if before is None else f" of {document['blocks_before']}"
        text = f"{node_id} is active again after {document['seconds']:.1f} s, with {document['blocks']}{had} blocks"
        console.print(text, markup=False, highlight=False)
    return EXIT_OK


def _pid_of(node_id: str, where: Where) -> int:
    """Raises InvalidArgument for a node that no `mooncache up` on this machine runs."""
    from mooncache.client.state_dir import read_cluster_file
    from mooncache.config import load

    folder = load(overrides={"cluster.state_dir": where.state_dir}).cluster.state_dir
    cluster = read_cluster_file(folder)
    parts = {} if cluster is None else {part.name: part for part in cluster.parts}
    if node_id not in parts or not node_id.startswith("node-"):
        raise InvalidArgument(
            f"{node_id} is no store node of a cluster that `mooncache up` runs in {folder}. "
            "Restart other nodes with what started them."
        )
    return parts[node_id].pid


async def _look(link: MasterLink, node_id: str, timeout_s: float) -> master_pb2.NodeStatus | None:
    """The node as the master sees it; None when it does not."""
    from mooncache.proto.v1 import master_pb2

    answer = await link.call(
        "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, timeout_s, attempt_s=2.0
    )
    return next((item for item in answer.nodes if item.node.node_id == node_id), None)


async def _await_next(
    link: MasterLink, node_id: str, before: master_pb2.NodeStatus | None, timeout_s: float
) -> master_pb2.NodeStatus:
    """The node's next process, when it is active and all its blocks are known.

    Raises:
        DeadlineExceeded: not in time.
    """
    from mooncache.proto.v1 import common_pb2
    from mooncache.runtime.clock import SystemClock

    clock = SystemClock()
    deadline_s = time.monotonic() + timeout_s
    former = before.node.incarnation if before is not None else 0
    while (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(MooncacheError):  # the next look may find more
            found = await _look(link, node_id, left_s)
            if (
                found is not None
                and found.node.incarnation != former
                and found.node.state == common_pb2.NODE_STATE_ACTIVE
                and not found.full_report_pending
            ):
                return found
        await clock.sleep(_POLL_S)
    raise DeadlineExceeded(f"{node_id} was not active again in time; `mooncache status` shows what it does.")
