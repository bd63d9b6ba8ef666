"""How a plan's numbers are written: tables for the terminal and the page from the same cells."""

from __future__ import annotations

from mooncache.plan.answer import Finalist, PlanReport
from mooncache.plan.core.certainty import Certainty
from mooncache.plan.core.estimate import Layout
from mooncache.plan.core.spec import Arrangement

FINALIST_COLUMNS = (
    "",
    "prefill",
    "decode",
    "each with",
    "/hour*",
    "model*",
    "sim*",
    "TTFT p99*",
    "TBT p90*",
    "hits*",
)
PRICE_COLUMNS = ("", "/hour*", "1M input*", "1M cached*", "1M output*")
OVERLOAD_NOTE = (
    "~ overloaded: requests are refused there, and the statistical model, which refuses evenly, can be far off in "
    "both directions"
)
PARETO_COLUMNS = ("/hour*", "within SLOs*", "goodput/s*", "prefill", "decode", "each with")


def machines(finalist: Finalist) -> tuple[str, str]:
    """What does prefill and what decodes: "4 H800", or "8 on 4 H800" when a machine holds two instances."""
    layout = finalist.plan.layout
    prefill, decode = counts(layout)
    if layout.arrangement is Arrangement.SWITCHING:
        decode += ", roles follow the load"
    return prefill + (f", in pipes of {layout.stages}" if layout.stages > 1 else ""), decode


def counts(layout: Layout) -> tuple[str, str]:
    """Machines for prefill and for decoding."""
    if layout.arrangement is Arrangement.BOTH:
        instances = layout.prefill_instances + layout.decode_instances
        return _count(instances, layout.nodes, layout.prefill.node.name) + " for both", "the same"
    return (
        _count(layout.prefill_instances, layout.prefill_nodes, layout.prefill.node.name),
        _count(layout.decode_instances, layout.decode_nodes, layout.decode.node.name),
    )


def _count(instances: int, nodes: int, name: str) -> str:
    return f"{nodes} {name}" if instances == nodes else f"{instances} on {nodes} {name}"


def equipment(finalist: Finalist) -> str:
    """Pool memory, disks and network of one machine."""
    layout = finalist.plan.layout
    disk = f" + {size(layout.ssd.gb)} SSD" if layout.ssd.gb else ""
    return f"{size(layout.dram.gb)}{disk}, {layout.nic.gbps:g}G"


def size(gigabytes: float) -> str:
    """GB or TB."""
    return f"{gigabytes / 1000:g} TB" if gigabytes >= 1000 else f"{gigabytes:g} GB"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one."""
    if value == float("inf"):
        return "never"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def price(value: float | None) -> str:
    """Two decimals, three below one; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:,.2f}"


def modelled(finalist: Finalist) -> str:
    """The model's share within the SLOs; a dash where it knows nothing, ~ where it is no more than a hint."""
    if finalist.plan.layout.arrangement is not Arrangement.FIXED:
        return "-"
    return f"{'~' if finalist.estimate.overloaded else ''}{finalist.estimate.attainment:.1%}"


def finalist_row(finalist: Finalist, mark: str) -> tuple[str, ...]:
    """One line of the table of finalists: what the simulator saw where it was asked, else the model."""
    prefill, decode = machines(finalist)
    run = finalist.runs[0] if finalist.runs else None
    return (
        mark,
        prefill,
        decode,
        equipment(finalist),
        price(finalist.plan.cost_per_hour),
        modelled(finalist),
        "-" if run is None else f"{run.attainment:.1%}",
        seconds(finalist.estimate.ttft_p99_s if run is None else run.ttft_p99_s),
        seconds(finalist.estimate.tbt_p90_s if run is None else run.tbt_p90_s),
        f"{finalist.estimate.hit_ratio if run is None else run.hit_ratio:.0%}",
    )


def pareto_row(finalist: Finalist) -> tuple[str, ...]:
    """One line of the Pareto table: the statistical model's numbers."""
    prefill, decode = machines(finalist)
    return (
        price(finalist.plan.cost_per_hour),
        modelled(finalist),
        f"{finalist.estimate.goodput_per_s:.2f}",
        prefill,
        decode,
        equipment(finalist),
    )


def price_row(finalist: Finalist, name: str) -> tuple[str, ...]:
    """Prices of one plan."""
    prices = finalist.prices
    return (
        name,
        price(finalist.plan.cost_per_hour),
        price(prices.input),
        price(prices.cached),
        price(prices.output),
    )


def overloaded(answer: PlanReport) -> bool:
    """Whether a number of the statistical model is shown that is for an overloaded cluster."""
    return any(finalist.estimate.overloaded for finalist in (*answer.finalists, *answer.frontier))


def ordered(answer: PlanReport) -> list[tuple[str, Finalist]]:
    """Finalists by cost with a mark: "best", the place of the others, and whether the simulator saw them miss."""
    target = answer.spec.slo.attainment
    rows = []
    for place, finalist in enumerate(sorted(answer.finalists or (answer.best,), key=_place), start=1):
        best = finalist.plan.layout.key == answer.best.plan.layout.key
        met = finalist.simulated is None or finalist.simulated >= target
        rows.append(("best" if best else f"{place}" if met else f"{place} misses", finalist))
    return rows


def _place(finalist: Finalist) -> tuple[object, ...]:
    return (finalist.plan.cost_per_hour, -(finalist.simulated or 0.0), *finalist.plan.order)


def asked(answer: PlanReport) -> str:
    """The question in one sentence."""
    slo, demand = answer.spec.slo, answer.demand
    return (
        f"{len(demand):,} requests of {answer.source} at {demand.rate_per_s:.2f}/s "
        f"({demand.input_tokens.mean():,.0f} tokens in, {demand.output_tokens.mean():,.0f} out); "
        f"{slo.attainment:.1%} within TTFT {seconds(slo.ttft_s)} and TBT {seconds(slo.tbt_s)}"
    )


def certainty_lines(certainty: Certainty, target: float) -> list[tuple[str, str]]:
    """(what, finding) of how sure the best plan is."""
    halves = " and ".join(f"{share:.1%}" for share in certainty.halves) or "not simulated"
    gap = f"{certainty.attainment_gap:+.1%} attainment, mean TTFT x{certainty.ttft_ratio:.2f}"
    gap += f", mean TBT x{certainty.tbt_ratio:.2f}"
    load = f"{certainty.load_margin:+.0%} before the target is missed (statistical model)"
    if not certainty.modelled:
        gap = load = "not said: the statistical model knows fixed roles only"
    margins = f"TTFT {certainty.ttft_margin:.0%}, TBT {certainty.tbt_margin:.0%}"
    return [
        ("model against simulator", gap),
        (
            "seeds",
            f"{certainty.seeds_low:.1%} to {certainty.seeds_high:.1%} within the SLOs, {target:.1%} wanted",
        ),
        ("halves of the trace alone", halves),
        ("margin to the SLOs", f"{margins} at the share that is wanted"),
        ("more load", load),
    ]
