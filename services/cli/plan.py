"""The command `mooncache plan`: the cheapest cluster that serves a workload within its SLOs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from mooncache.cli.common import AsJson, seconds_of
from mooncache.errors import InvalidArgument, PlanInvalid, ProfileInvalid, TraceInvalid
from mooncache.reporting.output import (
    EXIT_OK,
    EXIT_USAGE,
    check_writable,
    console,
    print_json,
    print_table,
    report_error,
)
from mooncache.reporting.workload import PUBLIC_FORMAT, TraceFormat, need_packages, progress

if TYPE_CHECKING:
    from mooncache.plan.answer import PlanReport
    from mooncache.plan.core.spec import Workload
    from mooncache.traces import Trace

WORKLOAD = Group("Workload", sort_key=11)
PROMISES = Group("Promises", sort_key=12)
HARDWARE = Group("Hardware and search", sort_key=13)
RESULTS = Group("Results", sort_key=14)


TracePath = Annotated[
    Path | None, Parameter(group=WORKLOAD, help="Requests to plan for (JSONL, Mooncake's format).")
]
Rate = Annotated[float | None, Parameter(group=WORKLOAD, help="Without a trace: requests per second.")]
Tokens = Annotated[float | None, Parameter(group=WORKLOAD, help="Without a trace: mean length, tokens.")]
Reuse = Annotated[
    float | None, Parameter(group=WORKLOAD, help="Without a trace: share of prompt tokens seen before.")
]
Speed = Annotated[
    float | None,
    Parameter(group=WORKLOAD, help="Factor on the arrival rate of the trace; 2 is twice as fast."),
]
Ttft = Annotated[
    str | None, Parameter(group=PROMISES, help='Time to the first token, for example "10s"; default 30s.')
]
Tbt = Annotated[
    str | None, Parameter(group=PROMISES, help='Time between tokens, for example "50ms"; default 100ms.')
]
Share = Annotated[
    float | None, Parameter(group=PROMISES, help="Share of requests that keep both promises; default 0.95.")
]
SpecPath = Annotated[
    Path | None,
    Parameter(group=HARDWARE, help="TOML file: machines, memory, disks, networks and their prices."),
]
Profile = Annotated[
    str | None, Parameter(group=HARDWARE, help="Model profile: a built-in name or a TOML file.")
]
Disk = Annotated[
    Path | None,
    Parameter(
        group=HARDWARE,
        help="Measured rates of a machine's disks: a file of `mooncache bench tiers --calibrate`. Counts for "
        "every [[ssd]] of the spec.",
    ),
]
Budget = Annotated[float | None, Parameter(group=HARDWARE, help="Highest cost per hour.")]
Finalists = Annotated[
    int,
    Parameter(group=HARDWARE, help="Plans to confirm in the simulator; 0 uses the statistical model alone."),
]
Seeds = Annotated[int, Parameter(group=HARDWARE, help="Simulations of the best plan with different seeds.")]
SimulateRequests = Annotated[
    int,
    Parameter(
        group=HARDWARE, help="Number of requests, from the busiest stretch, to simulate the finalists with."
    ),
]
HtmlPath = Annotated[Path | None, Parameter(name="--html", group=RESULTS, help="Write a page with plots.")]
OutDir = Annotated[
    Path | None,
    Parameter(group=RESULTS, help="Folder for mooncache.toml (services) and cluster.toml (simulate)."),
]
Example = Annotated[
    bool, Parameter(negative=(), group=RESULTS, help="Print a sample file for --spec and exit.")
]


def plan(
    *,
    trace: TracePath = None,
    rate: Rate = None,
    input_tokens: Tokens = None,
    output_tokens: Tokens = None,
    reuse: Reuse = None,
    speed: Speed = None,
    form: TraceFormat = PUBLIC_FORMAT,
    ttft: Ttft = None,
    tbt: Tbt = None,
    attainment: Share = None,
    spec: SpecPath = None,
    profile: Profile = None,
    disk: Disk = None,
    budget: Budget = None,
    finalists: Finalists = 3,
    seeds: Seeds = 3,
    simulate_requests: SimulateRequests = 6_000,
    html: HtmlPath = None,
    out: OutDir = None,
    example: Example = False,
    json: AsJson = False,
) -> int:
    """Find the cheapest cluster for a workload: machines for prefill and decode, pool, network, pipelines.

    A statistical model searches all combinations; the simulator, with the conductor's own policies, confirms the
    finalists. Without --spec the prices are invented examples; `--example` prints them as a file to start from.

    For example:

        mooncache plan --trace trace.jsonl --spec hardware.toml --ttft 10s --tbt 50ms --html plan.html --out plan/

        mooncache plan --rate 5 --input-tokens 8000 --output-tokens 300 --reuse 0.4
    """
    need_packages("numpy", *(("matplotlib",) if html is not None else ()))
    if example:
        from mooncache.plan.example import toml

        print(toml(), end="")
        return EXIT_OK
    overrides = {
        "slo.ttft_s": None if ttft is None else seconds_of(ttft, "--ttft", above_0=True),
        "slo.tbt_s": None if tbt is None else seconds_of(tbt, "--tbt", above_0=True),
        "slo.attainment": attainment,
        "model.profile": profile,
        "search.price_per_hour_max": budget,
        "workload.rate_per_s": rate,
        "workload.input_tokens_mean": input_tokens,
        "workload.output_tokens_mean": output_tokens,
        "workload.reuse": reuse,
        "speed": speed,
    }
    try:
        effort = (finalists, seeds, simulate_requests)
        return _plan((trace, form), (spec, disk), overrides, effort, (html, out), as_json=json)
    except (PlanInvalid, ProfileInvalid, TraceInvalid) as error:
        report_error(error, as_json=json)
        return EXIT_USAGE


def _plan(
    source: tuple[Path | None, TraceFormat],
    hardware: tuple[Path | None, Path | None],
    overrides: dict[str, Any],
    effort: tuple[int, int, int],
    results: tuple[Path | None, Path | None],
    *,
    as_json: bool,
) -> int:
    from mooncache.plan import loading
    from mooncache.plan.answer import document_of
    from mooncache.plan.run import Effort, Planner

    check_writable(results[0], "--html")
    _check_folder(results[1])
    question = loading.read(hardware[0], overrides, disk=hardware[1])
    finalists, seeds, requests = effort
    if finalists < 0 or seeds < 1 or requests < 100:
        raise InvalidArgument(
            "--finalists is at least 0, --seeds at least 1 and --simulate-requests at least 100."
        )
    requested, name = _workload(*source, question.spec.workload)
    with progress(quiet=as_json) as tell:
        planner = Planner(requested, question, name, lambda what, share: tell(what, share, 1.0))
        answer = planner.answer(Effort(finalists=finalists, seeds=seeds, requests_max=requests))
    written = _write(answer, planner.bases, requested.block_tokens, *results)
    if as_json:
        print_json({**document_of(answer), "files": [str(path) for path in written]})
    else:
        show(answer)
        for path in written:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return EXIT_OK


def _check_folder(out: Path | None) -> None:
    """Make the folder of the results before the work. Raises InvalidArgument."""
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--out: {out} cannot be made a folder: {error.strerror}.") from None
    check_writable(out / "mooncache.toml", "--out")


def _workload(path: Path | None, form: TraceFormat, workload: Workload | None) -> tuple[Trace, str]:
    from mooncache.plan.workload import made

    if path is not None and workload is not None:
        raise PlanInvalid(
            "A trace and a [workload] (or --rate, --input-tokens, ...) contradict each other: give one."
        )
    if path is not None:
        return form.read(path), path.name
    if workload is None:
        raise PlanInvalid(
            "Nothing to plan for: give --trace FILE, or --rate with --input-tokens and --output-tokens."
        )
    return made(workload), "a generated workload"


def _write(
    answer: PlanReport, bases: dict[str, Any], block_tokens: int, html: Path | None, out: Path | None
) -> list[Path]:
    from mooncache.plan import files

    written = []
    config = files.config_toml(answer)
    try:
        if out is not None:
            from mooncache.simulate.description import to_toml

            cluster = files.cluster(answer, bases, block_tokens)
            for name, text in ((files.CONFIG_NAME, config), (files.CLUSTER_NAME, to_toml(cluster))):
                (out / name).write_text(text, encoding="utf-8")
                written.append(out / name)
        if html is not None:
            from mooncache.plan.page import page

            html.write_text(page(answer, config), encoding="utf-8")
            written.append(html)
    except OSError as error:
        raise InvalidArgument(f"{error.filename} cannot be written: {error.strerror}.") from None
    return written


def show(answer: PlanReport) -> None:
    """The answer for people."""
    from mooncache.plan import words
    from mooncache.plan.files import beyond, up_command

    console.print(words.asked(answer), markup=False, soft_wrap=True)
    for note in answer.notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    rows = [words.finalist_row(finalist, mark) for mark, finalist in words.ordered(answer)]
    print_table("\nfinalists", words.FINALIST_COLUMNS, rows)
    prices = [words.price_row(answer.best, "best")]
    print_table("\nprices of the best plan", words.PRICE_COLUMNS, prices)
    pareto = [words.pareto_row(finalist) for finalist in answer.frontier]
    print_table("\nnothing is both cheaper and better (statistical model)", words.PARETO_COLUMNS, pareto)
    if words.overloaded(answer):
        console.print(words.OVERLOAD_NOTE, style="dim", markup=False, highlight=False, soft_wrap=True)
    if answer.certainty is None:
        console.print("\nnot simulated: the statistical model alone", style="yellow")
    else:
        style = {"high": "green", "fair": "yellow", "low": "red"}[answer.certainty.word]
        console.print(f"\nhow sure: [bold {style}]{answer.certainty.word}[/]")
        lines = words.certainty_lines(answer.certainty, answer.spec.slo.attainment)
        print_table("", ("", ""), lines)
        for doubt in answer.certainty.doubts:
            console.print(f"- {doubt}", style="yellow", markup=False, soft_wrap=True)
    for line in beyond(answer.best.plan.layout):
        console.print(f"not in the services' settings: {line}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"\nto try it small: {up_command(answer.best.plan.layout)}", markup=False, soft_wrap=True)
