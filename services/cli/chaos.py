"""`mooncache chaos`: break a cluster on this machine on purpose, check every answer, and judge."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from mooncache.cli.common import AsJson, seconds_of
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, error_console, print_json

if TYPE_CHECKING:
    from mooncache.chaos.core.faults import ChaosFault
    from mooncache.chaos.core.records import Record
    from mooncache.chaos.core.verdict import ChaosVerdict
    from mooncache.chaos.shell.run import ChaosOptions


def run(
    *only: Annotated[
        str, Parameter(help="Faults to make, by name, each at least once; none: those of the profile.")
    ],
    profile: Annotated[str, Parameter(help="quick, kill, stop, slow, bytes or all.")] = "quick",
    duration: Annotated[str, Parameter(help="How long; a fault that began is finished.")] = "3min",
    streams: Annotated[int, Parameter(help="Clients that ask at the same time.")] = 3,
    seed: Annotated[int | None, Parameter(help="Repeats the faults of a former run in their order.")] = None,
    report: Annotated[Path | None, Parameter(help="Write what happened as a page, for a browser.")] = None,
    own: Annotated[
        bool,
        Parameter(negative=(), help="Start a cluster for this run, instead of breaking the one that runs."),
    ] = False,
    compose: Annotated[
        str, Parameter(help="Break the containers of this Compose project on this machine; needs root.")
    ] = "",
    yes: Annotated[
        bool, Parameter(negative=(), help="Do it to the running cluster; without this nothing happens.")
    ] = False,
    state_dir: Annotated[
        Path | None, Parameter(help="State folder; default $MOONCACHE_STATE_DIR or ~/.mooncache.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Kill, stop, slow down and damage the processes of a cluster on this machine, one after the other.

    It is the cluster of `mooncache up`, or with --compose that of deploy/docker-compose.yml.

    Meanwhile clients ask the gateway and read the pool. Every answer is compared with one for which nothing was
    cached, every block with what was put. The next fault comes when all is well again. The exit code is 0 when every
    promise was kept, 1 when one was broken; requests on a process that is hit may fail, others may not.

    For example:

        mooncache chaos run --own --report chaos.html

        mooncache chaos run kill-master stop-store-node --duration 1min --yes

        mooncache chaos run --compose deploy --profile all --yes
    """
    from mooncache.chaos.core.verdict import judge
    from mooncache.chaos.shell.run import ChaosOptions
    from mooncache.config import load
    from mooncache.errors import InvalidArgument

    faults = _chosen(only, profile)
    if not 1 <= streams <= 256:
        raise InvalidArgument(f"--streams: {streams} must be between 1 and 256.")
    _check_cluster(compose, named=state_dir is not None, own=own, yes=yes)
    folder = load(overrides={"cluster.state_dir": state_dir}).cluster.state_dir
    options = ChaosOptions(
        faults,
        seconds_of(duration, "--duration", above_0=True),
        streams,
        seed if seed is not None else secrets.randbelow(1_000_000),
        rounds=1 if only else 0,
    )
    record = _run(options, folder, compose, own=own, quiet=json)
    verdict = judge(record)
    if report is not None:
        _write_page(report, record, verdict)
    if json:
        print_json(_document(record, verdict))
    else:
        _print(record, verdict)
    return EXIT_OK if verdict.kept else EXIT_MISS


def list_faults(*, json: AsJson = False) -> int:
    """Show every fault that a run can make, and the profiles it belongs to.

    For example:

        mooncache chaos list
    """
    from mooncache.chaos.core.faults import FAULTS, Profile, faults_of

    of = {fault: [str(each) for each in Profile if fault in faults_of(each)] for fault in FAULTS}
    if json:
        print_json({"faults": [{**_fault_row(fault), "profiles": of[fault]} for fault in FAULTS]})
        return EXIT_OK
    table = Table("fault", "row", "requests on it may fail", "profiles", box=None)
    for fault in FAULTS:
        table.add_row(fault.name, fault.row, "yes" if fault.may_fail else "no", ", ".join(of[fault]))
    console.print(table)
    console.print("Rows are those of docs/recovery.md.", style="dim")
    return EXIT_OK


def _chosen(only: Sequence[str], profile: str) -> Sequence[ChaosFault]:
    from mooncache.chaos.core.faults import Profile, faults_named, faults_of
    from mooncache.errors import InvalidArgument

    try:
        return faults_named(only) if only else faults_of(Profile(profile))
    except ValueError:
        choices = ", ".join(Profile)
        raise InvalidArgument(f"There is no profile {profile!r}. Profiles: {choices}.") from None


def _check_cluster(compose: str, *, named: bool, own: bool, yes: bool) -> None:
    """Raises InvalidArgument: it is not clear which cluster to break, or that it may be broken."""
    from mooncache.errors import InvalidArgument

    if compose and (own or named):
        raise InvalidArgument("--compose names the cluster to break; --own and --state-dir name another one.")
    if not own and not yes:
        raise InvalidArgument(
            "This kills and stops processes of the running cluster; requests on them fail. Add --yes to do it, or "
            "--own to break a cluster that is started for it."
        )


def _run(options: ChaosOptions, folder: Path, compose: str, *, own: bool, quiet: bool) -> Record:
    from mooncache.chaos.shell import run as runner
    from mooncache.chaos.shell.compose_target import ComposeTarget
    from mooncache.chaos.shell.local_target import LocalTarget
    from mooncache.chaos.shell.own_cluster import own_cluster

    async def on_containers(progress: Callable[[str], None]) -> Record:
        return await runner.run(await ComposeTarget.find(compose), options, progress)

    def work(progress: Callable[[str], None]) -> Record:
        if compose:
            return asyncio.run(on_containers(progress))
        if not own:
            return asyncio.run(runner.run(LocalTarget(folder), options, progress))
        with own_cluster(progress) as made:
            return asyncio.run(runner.run(LocalTarget(made), options, progress))

    if quiet:
        return work(lambda _text: None)
    with error_console.status("starting") as status:
        return work(status.update)


def _write_page(path: Path, record: Record, verdict: ChaosVerdict) -> None:
    from mooncache.chaos.report_page import report_page
    from mooncache.errors import InvalidArgument, Unsupported

    try:
        path.write_text(report_page(record, verdict), encoding="utf-8")
    except Unsupported as error:  # the run is over: its verdict must not be lost with the page
        error_console.print(f"No page was written. {error.message}", markup=False, style="red")
    except OSError as error:
        raise InvalidArgument(f"--report: {path} cannot be written: {error.strerror}.") from None


def _print(record: Record, verdict: ChaosVerdict) -> None:
    faults = Table("at", "fault", "target", "row", "well after", "served after", "failed", box=None)
    for each in verdict.faults:
        injection = each.injection
        faults.add_row(
            f"{injection.begun_s:.1f} s",
            injection.fault.name,
            injection.target,
            injection.fault.row,
            _after(injection.well_s, injection.begun_s),
            _after(injection.served_s, injection.begun_s),
            str(each.failed),
        )
    console.print(faults)
    for check in verdict.checks:
        mark, style = ("kept  ", "green") if check.kept else ("BROKEN", "bold red")
        console.print(f"[{style}]{mark}[/] ", end="")
        console.print(f"{check.promise}: {check.seen}", markup=False, highlight=False, soft_wrap=True)
    word = "Every promise was kept." if verdict.kept else "A promise was broken."
    console.print(f"{word} The same faults again: --seed {record.seed}", markup=False, highlight=False)


def _after(moment_s: float | None, begun_s: float) -> str:
    return f"{moment_s - begun_s:.1f} s" if moment_s is not None else "never"


def _fault_row(fault: ChaosFault) -> dict[str, Any]:
    return {"name": fault.name, "row": fault.row, "may_fail": fault.may_fail, "lasts_s": fault.lasts_s}


def _document(record: Record, verdict: ChaosVerdict) -> dict[str, Any]:
    from collections import Counter

    return {
        "kept": verdict.kept,
        "seed": record.seed,
        "cluster": record.cluster,
        "model": record.model,
        "seconds": round(record.seconds, 1),
        "promises": [
            {"promise": check.promise, "kept": check.kept, "seen": check.seen} for check in verdict.checks
        ],
        "requests": dict(Counter(str(answer.outcome) for answer in record.answers)),
        "cached_tokens": sum(answer.cached_tokens for answer in record.answers),
        "blocks": {"read": record.pool.read, "missed": record.pool.missed, "put": record.pool.put},
        "pool_errors": dict(record.pool.errors),
        "faults": [
            {
                **_fault_row(each.injection.fault),
                "target": each.injection.target,
                "begun_s": round(each.injection.begun_s, 2),
                "well_s": each.injection.well_s,
                "served_s": each.injection.served_s,
                "flipped": each.injection.flipped,
                "right": each.right,
                "failed": each.failed,
            }
            for each in verdict.faults
        ],
    }
