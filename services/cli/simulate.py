"""The command `mooncache simulate`: the conductor's own policies over a trace, on a cluster that need not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from cyclopts import Group, Parameter

from mooncache.cli.common import seconds_of
from mooncache.config.small_files import nearest
from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.reporting.output import (
    EXIT_OK,
    EXIT_USAGE,
    check_writable,
    console,
    print_json,
    report_error,
)
from mooncache.reporting.workload import PUBLIC_FORMAT, TraceFormat, need_packages, progress

if TYPE_CHECKING:
    from mooncache.conductor.core.policy.types import Rules
    from mooncache.simulate import ClusterSpec, Result
    from mooncache.traces import Trace

WORKLOAD = Group("Workload", sort_key=11)
CLUSTER = Group("Cluster", sort_key=12)
POLICIES = Group("Policies", sort_key=13)
RESULTS = Group("Results", sort_key=14)

REQUESTS_MAX = 5_000_000
SPEED_MAX = 10_000.0
MEMORY_TOKENS_MAX = 1_000_000_000_000

TracePath = Annotated[Path | None, Parameter(group=WORKLOAD, help="Requests (JSONL, Mooncake's format).")]
Generate = Annotated[
    int | None,
    Parameter(group=WORKLOAD, help="Number of requests to generate, like those of a public chatbot."),
]
Speed = Annotated[float, Parameter(group=WORKLOAD, help="Factor on the arrival rate; 2 is twice as fast.")]
First = Annotated[
    int | None, Parameter(group=WORKLOAD, help="Use only the first so many requests of the trace.")
]
ClusterPath = Annotated[
    Path | None, Parameter(name="--cluster", group=CLUSTER, help="TOML file; --example prints one.")
]
Prefill = Annotated[int | None, Parameter(group=CLUSTER, help="Prefill instances; default 8.")]
Decode = Annotated[int | None, Parameter(group=CLUSTER, help="Decode instances; default 8.")]
Memory = Annotated[
    int | None,
    Parameter(group=CLUSTER, help="KV tokens that fit the memory of a prefill node; default 3000000."),
]
Disk = Annotated[
    Path | None,
    Parameter(
        group=CLUSTER,
        help="Measured rates of a node's disks: a file of `mooncache bench tiers --calibrate`. "
        "The cluster's file says how many blocks they hold.",
    ),
]
Roles = Annotated[
    bool,
    Parameter(
        name="--roles",
        negative=(),
        group=CLUSTER,
        help="Let instances switch between prefill and decode with the load.",
    ),
]
Ttft = Annotated[str | None, Parameter(group=CLUSTER, help='Promised time to first token, like "30s".')]
Tbt = Annotated[str | None, Parameter(group=CLUSTER, help='Promised time between tokens, like "100ms".')]
PolicyNames = Annotated[
    list[str] | None,
    Parameter(
        name="--policy",
        group=POLICIES,
        consume_multiple=True,
        negative=(),
        help="One or several to compare; `all` for all of them. Default mooncache.",
    ),
]
Admission = Annotated[
    str | None, Parameter(group=POLICIES, help="Admission control: none, early, predicted, learned, ...")
]
Seed = Annotated[int, Parameter(group=POLICIES, help="Equal seeds give equal results.")]
JsonPath = Annotated[
    str | None,
    Parameter(
        name="--json",
        group=RESULTS,
        allow_leading_hyphen=True,
        help="Write rows and summaries to this file as JSON; - is stdout.",
    ),
]
HtmlPath = Annotated[Path | None, Parameter(name="--html", group=RESULTS, help="Write a page with plots.")]
LogPath = Annotated[
    Path | None,
    Parameter(
        name="--decisions", group=RESULTS, help="Write every scheduling decision with its reasons (JSONL)."
    ),
]
Example = Annotated[
    bool, Parameter(negative=(), group=RESULTS, help="Print a sample file for --cluster and exit.")
]


def simulate(
    *,
    trace: TracePath = None,
    generate: Generate = None,
    speed: Speed = 1.0,
    first: First = None,
    form: TraceFormat = PUBLIC_FORMAT,
    cluster: ClusterPath = None,
    prefill: Prefill = None,
    decode: Decode = None,
    memory_tokens: Memory = None,
    disk: Disk = None,
    roles: Roles = False,
    ttft: Ttft = None,
    tbt: Tbt = None,
    policy: PolicyNames = None,
    admission: Admission = None,
    seed: Seed = 1,
    json: JsonPath = None,
    html: HtmlPath = None,
    decisions: LogPath = None,
    example: Example = False,
) -> int:
    """Run requests through the conductor's policies on a simulated cluster, and show what clients would get.

    The policies are the code that the running conductor uses. Without --cluster the cluster is the one of the Mooncake
    paper: LLaMA3-70B on nodes of 8 x A800, 8 for prefill and 8 for decode.

    For example:

        mooncache simulate --generate 2000

        mooncache simulate --trace trace.jsonl --speed 2 --policy mooncache algorithm1 --html report.html
    """
    try:
        if json is not None and json != "-" and json.startswith("-"):
            raise InvalidArgument("--json needs a file, or - for stdout.")
        need_packages("numpy", *(("matplotlib",) if html is not None else ()))
        if example:
            print(_example(), end="")
            return EXIT_OK
        check_writable(html, "--html")
        check_writable(Path(json) if json not in (None, "-") else None, "--json")
        check_writable(decisions, "--decisions")
        requests = _workload(trace, form, generate, first, speed, seed)
        block_tokens = requests.block_tokens
        counts = {"prefill": prefill, "decode": decode}
        spec = _cluster(cluster, counts, memory_tokens, roles=roles, block_tokens=block_tokens)
        spec = _with_disk(_promised(spec, ttft, tbt), disk)
        names = _policies(policy)
        options = _Options(seed, admission, speed, decisions)
        results = _run(requests, spec, names, options, quiet=json == "-")
        _deliver(results, spec, options, json, html, trace)
    except MooncacheError as error:
        code = report_error(error, as_json=json == "-")
        return EXIT_USAGE if 720 <= error.code <= 729 else code
    return EXIT_OK


class _Options:
    """What all runs of one command share."""

    def __init__(self, seed: int, admission: str | None, speed: float, decisions: Path | None) -> None:
        self.seed, self.admission, self.speed, self.decisions = seed, admission, speed, decisions
        self.lines = 0

    def rules(self) -> Rules:
        from mooncache.conductor.core.policy.types import AdmissionMode, Rules

        if self.admission is None:
            return Rules()
        if self.admission not in set(AdmissionMode):
            raise InvalidArgument(
                f"--admission: {self.admission} is unknown; choose one of {', '.join(AdmissionMode)}."
            )
        return Rules(admission=AdmissionMode(self.admission))


def _example() -> str:
    from mooncache.simulate import paper_cluster
    from mooncache.simulate.description import to_toml

    return to_toml(paper_cluster())


def _workload(
    path: Path | None, form: TraceFormat, generated: int | None, first: int | None, speed: float, seed: int
) -> Trace:
    import random

    from mooncache.traces import GenerateOptions
    from mooncache.traces import generate as make_up

    if (path is None) == (generated is None):
        raise InvalidArgument("Name the requests: --trace FILE, or --generate N to generate N of them.")
    if not 1 / SPEED_MAX <= speed <= SPEED_MAX:
        raise InvalidArgument(
            f"--speed: {speed:g} must be between {1 / SPEED_MAX:g} and {SPEED_MAX:g}; 2 is twice as fast."
        )
    if path is not None:
        trace = form.read(path)
    else:
        if generated is None or not 1 <= generated <= REQUESTS_MAX:
            raise InvalidArgument(f"--generate: {generated} requests; it must be 1 to {REQUESTS_MAX:,}.")
        trace = make_up(GenerateOptions(requests=generated), random.Random(seed))
    if first is not None:
        if first < 1:
            raise InvalidArgument(f"--first: {first} requests; at least 1.")
        trace = trace.first(first)
    return trace.speed(speed) if speed != 1.0 else trace


def _cluster(
    path: Path | None,
    counts: dict[str, int | None],
    memory_tokens: int | None,
    *,
    roles: bool,
    block_tokens: int,
) -> ClusterSpec:
    from mooncache.simulate import paper_cluster
    from mooncache.simulate.cluster import RoleSwitching
    from mooncache.simulate.description import read

    if path is not None:
        if memory_tokens is not None or roles or any(count is not None for count in counts.values()):
            raise InvalidArgument(
                "--cluster says how many instances and how much memory; leave out --prefill, --decode, "
                "--memory-tokens and --roles."
            )
        return read(path)
    wanted = {name: 8 if count is None else count for name, count in counts.items()}
    for name, count in wanted.items():
        if count < 0:
            raise InvalidArgument(f"--{name}: {count} instances; it must be at least 0.")
    tokens = 3_000_000 if memory_tokens is None else memory_tokens
    if not 0 <= tokens <= MEMORY_TOKENS_MAX:
        raise InvalidArgument(f"--memory-tokens: {tokens} tokens; it must be 0 to {MEMORY_TOKENS_MAX:,}.")
    switching = RoleSwitching(enabled=roles)
    return paper_cluster(
        wanted["prefill"], wanted["decode"], tokens, roles=switching, block_tokens=block_tokens
    )


def _promised(spec: ClusterSpec, ttft: str | None, tbt: str | None) -> ClusterSpec:
    from dataclasses import replace

    slo = spec.slo
    if ttft is not None:
        slo = replace(slo, ttft_s=seconds_of(ttft, "--ttft", above_0=True))
    if tbt is not None:
        slo = replace(slo, tbt_s=seconds_of(tbt, "--tbt", above_0=True))
    return replace(spec, slo=slo).check()


def _with_disk(spec: ClusterSpec, path: Path | None) -> ClusterSpec:
    from mooncache.simulate import disk_profile

    return spec if path is None else disk_profile.with_disks(spec, disk_profile.read(path))


def _policies(names: list[str] | None) -> list[str]:
    from mooncache.conductor.core.policy import NAMES

    wanted = list(dict.fromkeys(names or ["mooncache"]))
    if wanted == ["all"]:
        return list(NAMES)
    for name in wanted:
        if name not in NAMES:
            raise InvalidArgument(f"--policy: {name} is unknown; {nearest(name, (*NAMES, 'all'))}")
    return wanted


def _run(
    trace: Trace, spec: ClusterSpec, names: list[str], options: _Options, *, quiet: bool
) -> list[Result]:
    from mooncache.simulate import SimOptions
    from mooncache.simulate import simulate as run
    from mooncache.simulate.report.decisions import DecisionLog

    rules = options.rules()
    results = []
    with _open(options.decisions) as file, progress("requests", quiet=quiet) as tell:
        for name in names:
            log = DecisionLog(file, name) if file is not None else None
            chosen = SimOptions(
                policy=name, rules=rules, seed=options.seed, on_decision=log.write if log else None
            )
            results.append(run(trace, spec, chosen, progress=lambda done, total, _s: tell(name, done, total)))  # noqa: B023
            options.lines += log.lines if log else 0
    return results


@contextmanager
def _open(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--decisions: {path} cannot be written: {error.strerror}.") from None
    with file:
        yield file


def _deliver(
    results: list[Result],
    spec: ClusterSpec,
    options: _Options,
    json: str | None,
    html: Path | None,
    trace: Path | None,
) -> None:
    from mooncache.simulate.report import tables
    from mooncache.simulate.report.document import document
    from mooncache.simulate.report.summary import summarise

    summaries = [summarise(result) for result in results]
    about = {
        "cluster": spec.name,
        "instances": {group.label: group.count for group in spec.instances},
        "model": spec.profile.name,
        "trace": trace.name if trace is not None else "generated",
        "requests": len(results[0]),
        "speed": options.speed,
        "seed": options.seed,
        "ttft_slo_s": results[0].ttft_slo_s,
        "tbt_slo_s": results[0].tbt_slo_s,
    }
    written = []
    try:
        if html is not None:
            from mooncache.simulate.report.page import page

            html.write_text(page(results, summaries, about), encoding="utf-8")
            written.append(str(html))
        if json is not None and json != "-":
            import json as json_module

            text = json_module.dumps(document(summaries, about), indent=1)
            Path(json).write_text(text + "\n", encoding="utf-8")
            written.append(json)
    except OSError as error:
        raise InvalidArgument(f"{error.filename} cannot be written: {error.strerror}.") from None
    if options.decisions is not None:
        written.append(f"{options.decisions} ({options.lines:,} decisions)")
    if json == "-":
        print_json(document(summaries, about))
        return
    tables.show_about(console, about, summaries)
    if len(results) == 1:
        tables.show_run(console, results[0], summaries[0])
    else:
        tables.show_comparison(console, summaries)
    tables.show_words(console)
    for name in written:
        console.print(f"wrote {name}", markup=False, soft_wrap=True)
    if not written:
        console.print(
            "Next: --policy mooncache algorithm1 random compares, --html report.html draws, --speed 2 loads.",
            style="dim",
            markup=False,
            soft_wrap=True,
        )
