"""`mooncache upgrade`: bring the processes of the running cluster to the version of this command, one by one."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mooncache.cli.common import WHERE, AsJson, Where
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, print_json

if TYPE_CHECKING:
    from mooncache.cli.core.upgrade_check import RunningProcess
    from mooncache.cli.rolling import RolledProcess
    from mooncache.cli.snapshot import ClusterPoller, ClusterSnapshot
    from mooncache.topology.core.findings import Finding

_ENVIRON_BYTES_MAX = 1 << 20


@Parameter(name="*")
@dataclass(frozen=True)
class UpgradeWhere(Where):
    """The same with a longer limit, for each process: an engine first finishes its requests, and then starts again."""

    timeout: Annotated[
        str, Parameter(group=WHERE, help='Time limit for each process, for example "10min".')
    ] = "5min"


UPGRADE_HERE = UpgradeWhere()


def upgrade(
    *,
    check: Annotated[
        bool,
        Parameter(negative=(), help="Only say what would be done, in which order, and what would not fit."),
    ] = False,
    force: Annotated[bool, Parameter(negative=(), help="Go on although something would not fit.")] = False,
    where: UpgradeWhere = UPGRADE_HERE,
    json: AsJson = False,
) -> int:
    """Bring the running cluster to the version of this command, without a failed request and without a lost block.

    Install the other version beside this one, in an environment of its own, and call its `mooncache upgrade`: it
    restarts the processes of `mooncache up` one after the other, with its own Python. The way back is the same command
    of the former version. Processes that something else started (systemd, Kubernetes) are listed, in the order in
    which to restart them.

    For example:

        python -m venv /opt/mooncache-next && /opt/mooncache-next/bin/pip install mooncache

        /opt/mooncache-next/bin/mooncache upgrade --check

        /opt/mooncache-next/bin/mooncache upgrade --timeout 10min
    """
    return asyncio.run(_upgrade(where, check_only=check, force=force, as_json=json))


async def _upgrade(where: Where, *, check_only: bool, force: bool, as_json: bool) -> int:
    from mooncache._version import __version__
    from mooncache.cli.core import upgrade_check
    from mooncache.cli.findings import show
    from mooncache.cli.snapshot import ClusterPoller
    from mooncache.runtime.formats import FORMATS
    from mooncache.topology.core.findings import BAD

    poller = ClusterPoller(where)
    try:
        found, processes = await look(poller)
        found += upgrade_check.check(processes, __version__, FORMATS)
        order = upgrade_check.in_order(processes, __version__)
        document: dict[str, Any] = {
            "version": __version__,
            "processes": [_row(process) for process in processes],
            "findings": [finding._asdict() for finding in found],
            "order": [process.name for process in order],
            "rolled": [],
        }
        if not as_json:
            show(found)
            _show_order(order)
        refused = any(finding.grade == BAD for finding in found) and not force
        mine = [process for process in order if process.here]
        if not check_only and not refused and mine:
            rolled = await _roll(poller, mine, __version__, where.timeout_s, as_json=as_json)
            document["rolled"] = [asdict(item) for item in rolled]
        elif not check_only and refused and not as_json:
            console.print("nothing was restarted: see above", style="red")
    finally:
        await poller.close()
    if as_json:
        print_json(document)
    return EXIT_MISS if refused else EXIT_OK


async def _roll(
    poller: ClusterPoller, order: list[RunningProcess], target: str, timeout_s: float, *, as_json: bool
) -> list[RolledProcess]:
    """Restart them with this interpreter. Raises what the first that fails raises; the others are left as they are."""
    from mooncache.cli.rolling import Roller
    from mooncache.cluster.interpreter import choose_interpreter
    from mooncache.errors import MooncacheError

    choose_interpreter(poller.config.cluster.state_dir, sys.executable)
    roller, rolled = Roller(poller, target, timeout_s), []
    for process in order:
        try:
            rolled.append(await roller.roll(process))
        except MooncacheError as error:
            done = ", ".join(item.name for item in rolled) or "none"
            raise type(error)(
                f"{error.message} Upgraded so far: {done}. Go on with this command, or go back with the same command "
                "of the former version."
            ) from None
        if not as_json:
            last = rolled[-1]
            text = f"{last.name}: {last.former} to {last.version} in {last.seconds:.1f} s"
            console.print(text, markup=False, highlight=False)
    return rolled


async def look(poller: ClusterPoller) -> tuple[list[Finding], list[RunningProcess]]:
    """What runs, and what is not as it should be before anything is restarted."""
    from mooncache.conductor.core.registry import InstanceState
    from mooncache.topology.core.findings import BAD, WARN, Finding

    snapshot = await poller.poll(with_metrics=False)
    found: list[Finding] = []
    if snapshot.status is None:
        why = snapshot.master_error.message if snapshot.master_error is not None else "did not answer"
        found.append(Finding(BAD, "master", why, "upgrade a cluster that is well: `mooncache doctor`"))
    if snapshot.conductor_error:
        found.append(
            Finding(
                BAD,
                "conductor",
                snapshot.conductor_error,
                "upgrade a cluster that is well: `mooncache doctor`",
            )
        )
    for part in snapshot.parts:
        if part.reason:
            text = f"{part.name}: {part.reason}"
            found.append(Finding(BAD, "processes", text, "wait until all are ready: `mooncache status`"))
    for row in snapshot.instances or []:
        if row["state"] != InstanceState.READY:
            text = f"{row['instance_id']} is {row['state']}"
            found.append(
                Finding(WARN, "engines", text, "wait until it is ready, or take it back: instance undrain")
            )
    return found, await _processes(poller, snapshot)


async def _processes(poller: ClusterPoller, snapshot: ClusterSnapshot) -> list[RunningProcess]:
    from mooncache.cli.core.upgrade_check import RunningProcess
    from mooncache.cli.rolling import node_formats
    from mooncache.cluster.processes import ServiceKind
    from mooncache.kvcache.instance_role import InstanceRole

    pids = {part.name: part.pid for part in snapshot.parts}

    def seen(name: str, kind: ServiceKind, version: str, **more: Any) -> RunningProcess:
        here = name in pids
        problem = settings_problem(pids[name]) if here else ""
        return RunningProcess(name, kind, version, here=here, settings_problem=problem, **more)

    found = []
    if snapshot.status is not None:
        name = "master" if "master" in pids else snapshot.status.master_id
        found.append(seen(name, ServiceKind.MASTER, snapshot.status.software_version))
        for item in snapshot.status.nodes:
            formats, _ = await node_formats(poller, item.node.endpoints.grpc_target)
            node = item.node
            found.append(seen(node.node_id, ServiceKind.STORE_NODE, node.software_version, formats=formats))
    for row in snapshot.instances or []:
        generates = row["role"] != InstanceRole.PREFILL
        name, version = str(row["instance_id"]), str(row["software_version"])
        found.append(seen(name, ServiceKind.WORKER, version, model=str(row["model"]), generates=generates))
    if snapshot.conductor is not None:
        found.append(seen("conductor", ServiceKind.CONDUCTOR, str(snapshot.conductor["software_version"])))
        gateways = snapshot.conductor["gateways"]
        assert isinstance(gateways, list)
        for gateway in gateways:
            url, version = str(gateway["url"]), str(gateway["software_version"])
            ours = "gateway" in pids and url == poller.gateway_url
            found.append(seen("gateway" if ours else url, ServiceKind.GATEWAY, version))
    return found


def settings_problem(pid: int) -> str:
    """What this version says of the settings of a running process of this machine; "" when it takes them."""
    from mooncache.config import load
    from mooncache.errors import ConfigInvalid

    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            pairs = file.read(_ENVIRON_BYTES_MAX).split(b"\0")
    except OSError:
        return ""  # it has ended, or is another user's
    env = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if b"=" in pair)
    try:
        load(env=env)
    except ConfigInvalid as error:
        return error.message
    return ""


def _row(process: RunningProcess) -> dict[str, Any]:
    return {
        "name": process.name,
        "kind": str(process.kind),
        "version": process.version,
        "here": process.here,
        "formats": dict(process.formats),
        "settings_problem": process.settings_problem,
    }


def _show_order(order: list[RunningProcess]) -> None:
    if order:
        console.print("order: " + ", ".join(process.name for process in order), markup=False, soft_wrap=True)
