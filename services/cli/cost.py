"""`mooncache cost`, `cost prices`, `cost what-if`: what requests cost, what caches saved, what more memory brings."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from mooncache.cli.common import HERE, AsJson, Where, seconds_of
from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.reporting.output import EXIT_OK, console, human_age, print_json, print_table
from mooncache.reporting.workload import PUBLIC_FORMAT, TraceFormat, need_packages

if TYPE_CHECKING:
    from mooncache.prices.core.cost_sums import StoredBytes
    from mooncache.prices.core.price_book import EngineHour, PriceBook
    from mooncache.prices.core.request_cost import RequestCost

FACTOR_MAX: Final = 1000.0
_PAGES_MAX: Final = 10_000
_MASTER_S: Final = 3.0  # what the pool holds is one column of many: the rest need not wait longer for it
_MADE_UP: Final = (
    "MADE-UP EXAMPLE PRICES: put yours into a file (`mooncache cost prices` prints one) for --prices."
)
Prices = Annotated[
    Path | None,
    Parameter(help="Price book, TOML; `mooncache cost prices` prints one. Default: made-up examples."),
]


@dataclass
class Seen:
    """What the cluster answered. `notes` says what it did not."""

    records: list[dict[str, Any]] = field(default_factory=list)
    window_s: float = 0.0
    instances: list[Any] = field(default_factory=list)
    stored: dict[str, StoredBytes] = field(default_factory=dict)
    capacity: StoredBytes | None = None
    notes: list[str] = field(default_factory=list)


def cost(
    *,
    window: Annotated[str, Parameter(help='Length of time to look back, like "1h".')] = "1h",
    prices: Prices = None,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Show what the last requests cost, by tenant, by class and per million tokens, and what caches saved.

    It reads the conductor's records (the last 10,000 decisions) and what tenants hold in the pool, so it needs the
    cluster token. --tenant shows one tenant. Figures have two digits: they rest on assumptions, which are printed.

    For example:

        mooncache cost

        mooncache cost --window 15min --prices prices.toml --tenant team-a

        mooncache cost prices > prices.toml
    """
    from mooncache.prices.loading import read_prices

    window_s = seconds_of(window, "--window", above_0=True)
    book = read_prices(prices)
    seen = _ask(replace(where, tenant=None), window_s)
    document = cost_document(seen, book, made_up=prices is None, tenant=where.tenant)
    if json:
        print_json(document)
    else:
        _show(document)
    return EXIT_OK


def print_prices() -> int:
    """Print a price book to edit. `mooncache plan --spec` takes the same file.

    For example:

        mooncache cost prices > prices.toml
    """
    from mooncache.prices import example

    print(example.prices_toml(), end="")
    return EXIT_OK


def what_if(
    trace: Annotated[
        Path, Parameter(help="Requests, as a gateway captured them (JSONL, Mooncake's format).")
    ],
    /,
    *,
    dram: Annotated[
        list[str] | None,
        Parameter(consume_multiple=True, negative=(), help='Times the memory, like "2x"; default 2x.'),
    ] = None,
    cluster: Annotated[
        Path | None, Parameter(help="The cluster, TOML; `mooncache simulate --example` prints one.")
    ] = None,
    prices: Prices = None,
    seed: Annotated[int, Parameter(help="Equal seeds give equal results.")] = 1,
    form: TraceFormat = PUBLIC_FORMAT,
    json: AsJson = False,
) -> int:
    """Play a captured trace with more memory for blocks, and price what that saves.

    The simulator plays the trace with the memory of the cluster and with each factor. Without --cluster the cluster is
    the one of the Mooncake paper. All other hours of a month are taken to be like the trace.

    For example:

        mooncache cost what-if trace.jsonl --dram 2x

        mooncache cost what-if trace.jsonl --cluster cluster.toml --dram 0.5x 2x 4x --prices prices.toml
    """
    need_packages("numpy")
    from mooncache.plan.more_memory import play
    from mooncache.prices.core import cost_sums
    from mooncache.prices.core.price_book import PricedEngine
    from mooncache.prices.loading import read_prices
    from mooncache.simulate import paper_cluster
    from mooncache.simulate.description import read

    factors = [_factor(text) for text in dram or ["2x"]]
    book = read_prices(prices)
    requests = form.read(trace, "TRACE")
    spec = read(cluster) if cluster is not None else paper_cluster(block_tokens=requests.block_tokens)
    hour = book.engine_hour(PricedEngine("", "vllm", max(1, spec.profile.gpus)))
    if hour.price is None or book.dram_gb_hour is None:
        raise InvalidArgument(f"The price book cannot say what memory saves: {'; '.join(book.holes())}.")
    now = play(requests, spec, 1.0, seed)
    rows = [
        cost_sums.what_if(now, play(requests, spec, factor, seed), book.dram_gb_hour, hour.price)
        for factor in factors
    ]
    _show_what_if(now, rows, book, hour, made_up=prices is None, as_json=json)
    return EXIT_OK


def _show_what_if(
    now: Any, rows: list[Any], book: PriceBook, hour: EngineHour, *, made_up: bool, as_json: bool
) -> None:
    from mooncache.cli.core import cost_text
    from mooncache.prices.core.cost_sums import WhatIf

    assumed = [
        f"an instance costs {cost_text.money(hour.price)} {book.cost.currency} an hour ({hour.basis})",
        "every hour of a month is like the trace, and time of engines that is not needed is not paid for",
        "only computing of prompts is counted as saved; time to the first token has no price",
    ]
    if as_json:
        found = [{**asdict(row), "gain_per_month": row.gain_per_month} for row in rows]
        document = {"currency": book.cost.currency, "made_up_prices": made_up, "assumed": assumed}
        print_json({**document, "now": asdict(now), "what_if": found})
        return
    table = cost_text.what_if_rows([WhatIf(now, 0.0, 0.0), *rows])
    print_table(f"a month, {book.cost.currency}", cost_text.WHAT_IF_COLUMNS, table)
    _say(*([_MADE_UP] if made_up else []), *(f"assumed: {line}" for line in assumed))


def _factor(text: str) -> float:
    try:
        value = float(text.lower().removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 0 < value <= FACTOR_MAX:
        raise InvalidArgument(
            f"--dram: {text} is not a factor such as 2x, above 0 and at most {FACTOR_MAX:g}x."
        )
    return value


def cost_document(seen: Seen, book: PriceBook, *, made_up: bool, tenant: str | None) -> dict[str, Any]:
    """Everything that `mooncache cost` says, as a plain document."""
    from mooncache.cli.core import cost_text
    from mooncache.prices.core import cost_sums
    from mooncache.prices.core.request_cost import ENDED, price_of_request
    from mooncache.prices.engines import engine_hours

    hours = max(seen.window_s, 1.0) / 3600
    engines = engine_hours((view.instance for view in seen.instances), book)
    ended = [record for record in seen.records if record["state"] in ENDED]
    costs = [price_of_request(record, book, engines) for record in ended]
    stored = dict(seen.stored)
    if tenant is not None:
        costs = [each for each in costs if each.tenant == tenant]
        stored = {name: size for name, size in stored.items() if name == tenant}
    tenants = cost_sums.by_tenant(costs, stored, hours, book)
    storage = sum(part.storage for part in tenants.values())
    total, classes = cost_sums.sum_of(costs, storage), cost_sums.by_class(costs, storage)
    notes = list(seen.notes) + _not_priced(costs)
    left = len(seen.records) - len(ended)
    if left:
        notes.append(
            f"{left:,} decisions of requests that still run, were refused or were planned again: not counted"
        )
    document: dict[str, Any] = {
        "currency": book.cost.currency,
        "made_up_prices": made_up,
        "window_s": seen.window_s,
        "tenants": {name: _sum_fields(part) for name, part in tenants.items()},
        "total": _sum_fields(total),
        "classes": {name: _sum_fields(part) for name, part in classes.items()},
        "engines": {
            name: {"price_per_hour": hour.price, "basis": hour.basis, "assumed": hour.assumed}
            for name, hour in sorted(engines.items())
        },
        "engines_paid": sum(hour.price or 0.0 for hour in engines.values()) * hours,
        "payback": [],
        "holes": book.holes(),
        "notes": notes,
        "assumed": [*_assumed(engines), *cost_text.ASSUMED],
        "not_seen": cost_text.NOT_SEEN,
    }
    lines = [
        cost_text.per_million_line(total, book.cost.currency),
        cost_text.saved_line(total, book.cost.currency),
    ]
    if tenant is None:
        lines.append(
            f"engines were there for {cost_text.money(document['engines_paid'])} {book.cost.currency}; these requests "
            f"used {cost_text.money(total.prefill + total.decode)} of it"
        )
        if seen.capacity is not None:
            rows = cost_sums.paybacks(seen.capacity, total, hours, book)
            document["payback"] = [{**asdict(row), "ratio": row.ratio} for row in rows]
            age = human_age(seen.window_s)
            lines += [cost_text.payback_line(row, age, book.cost.currency) for row in rows]
    document["lines"] = lines
    document["rows"] = cost_text.tenant_rows(tenants, total)
    document["class_rows"] = cost_text.class_rows(classes)
    return document


def _sum_fields(part: Any) -> dict[str, Any]:
    names = ("total", "saved", *(f"per_million_{kind}" for kind in ("input", "cached", "output", "tokens")))
    return {**asdict(part), **{name: getattr(part, name) for name in names}}


def _not_priced(costs: Iterable[RequestCost]) -> list[str]:
    """Gaps and estimates of requests, each with how many have it."""
    from collections import Counter

    counts = Counter(text for each in costs for text in (*each.gaps, *each.estimates))
    return [f"{text} ({count:,} requests)" for text, count in counts.most_common(10)]


def _assumed(engines: Mapping[str, EngineHour]) -> list[str]:
    found: dict[str, list[str]] = {}
    for name, hour in engines.items():
        if hour.assumed:
            found.setdefault(hour.basis, []).append(name)
    return [
        f"assumed: {', '.join(sorted(names)[:8])}{', ...' if len(names) > 8 else ''} run on {basis}; rules in "
        "cost.engine of the price book say otherwise"
        for basis, names in sorted(found.items())
    ]


def _show(document: dict[str, Any]) -> None:
    from mooncache.cli.core import cost_text

    title = f"cost of the last {human_age(document['window_s'])}, {document['currency']}"
    print_table(title, cost_text.TENANT_COLUMNS, document["rows"])
    hidden = len(document["tenants"]) - cost_text.TENANTS_MAX
    if hidden > 0:
        _say(f"{hidden} further tenants: --json")
    if document["class_rows"]:
        print_table(
            f"online and offline, {document['currency']}", cost_text.CLASS_COLUMNS, document["class_rows"]
        )
    _say(*document["lines"])
    if document["made_up_prices"]:
        _say(_MADE_UP)
    _say(*document["holes"], *document["notes"], *document["assumed"], document["not_seen"])


def _say(*lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _ask(where: Where, window_s: float) -> Seen:
    """Records of the window, instances, and what the pool holds. Raises what a silent conductor raises."""
    import asyncio

    seen = asyncio.run(_ask_conductor(where, window_s))
    try:
        where.ask_master(lambda link: _ask_master(link, seen, min(where.timeout_s, _MASTER_S)))
    except MooncacheError as error:
        seen.notes.append(
            f"the master did not say what the pool holds, so storage is not counted: {error.message}"
        )
    return seen


async def _ask_conductor(where: Where, window_s: float) -> Seen:
    from mooncache.proto.v1 import conductor_pb2 as pb

    seen = Seen()
    channel = where.conductor_channel()
    try:
        status = await channel.call(
            "GetConductorStatus",
            pb.GetConductorStatusRequest(),
            pb.GetConductorStatusResponse,
            where.timeout_s,
        )
        listed = await channel.call(
            "ListInstances", pb.ListInstancesRequest(), pb.ListInstancesResponse, where.timeout_s
        )
        seen.instances = list(listed.instances)
        now_s, before, complete = time.time(), "", False
        oldest_s, count, kept_max = now_s, 0, 0
        for _ in range(_PAGES_MAX):
            asked = pb.ListDecisionsRequest(before=before)
            page = await channel.call("ListDecisions", asked, pb.ListDecisionsResponse, where.timeout_s)
            records = [json_module.loads(text) for text in page.records_json]
            kept = [record for record in records if record["made_at_s"] >= now_s - window_s]
            seen.records += kept
            count, kept_max = count + len(records), page.kept_max
            complete = len(kept) < len(records)
            if not records or complete:
                break
            before, oldest_s = records[-1]["decision_id"], records[-1]["made_at_s"]
    finally:
        await channel.close()
    up_s = max(status.uptime_ms / 1e3, 1.0)
    seen.window_s = min(window_s, up_s)
    if not complete and kept_max and count >= kept_max:
        seen.window_s = min(seen.window_s, max(now_s - oldest_s, 1.0))
        seen.notes.append(
            f"the conductor keeps {kept_max:,} decisions, which go back {human_age(seen.window_s)}: older ones are gone"
        )
    elif up_s < window_s:
        seen.notes.append(
            f"the conductor has run for {human_age(up_s)} only, and knows nothing of the time before"
        )
    return seen


async def _ask_master(link: Any, seen: Seen, timeout_s: float) -> None:
    """What tenants hold now, and the memory that the nodes have for blocks."""
    from mooncache.client.results import tier_of_message
    from mooncache.prices.core.cost_sums import StoredBytes
    from mooncache.proto.v1 import master_pb2

    status = await link.call(
        "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, timeout_s
    )
    listed = await link.call(
        "ListTenants", master_pb2.ListTenantsRequest(), master_pb2.ListTenantsResponse, timeout_s
    )
    memory = on_gpus = 0
    for item in status.nodes:
        for segment in item.node.segments:
            if tier_of_message(segment.tier) == "hbm":
                on_gpus += segment.capacity_bytes
            else:
                memory += segment.capacity_bytes
    disk = 0
    for node in listed.nodes:
        for row in node.tenants:
            held = seen.stored.get(row.tenant, StoredBytes())
            on_disk = row.figures.get("disk_bytes", 0)
            disk += on_disk
            seen.stored[row.tenant] = StoredBytes(
                held.memory_bytes + row.figures.get("bytes", 0), held.disk_bytes + on_disk
            )
    seen.capacity = StoredBytes(memory, disk)
    seen.notes.append("storage: what tenants hold now, taken for the whole window; disks by what they hold")
    if on_gpus:
        seen.notes.append(
            f"{on_gpus / 1e9:.2g} GB of the pool are GPU memory, which engines' machines pay for"
        )
