"""What a layout costs for an hour, and what that is per million tokens.

Every part of the price is charged to the tokens that need it: decode machines to output tokens, prefill machines to
input and cached tokens by the computing time each takes, pool memory, disks and half of the network (what is fetched)
to cached tokens; the other half (what is handed over) to input. The three parts add up to the whole price again.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncache.plan.core.estimate import Estimator, Layout
from mooncache.plan.core.spec import Spec
from mooncache.prices.core.price_book import HOUR_S, MILLION, per_million


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Price of a million tokens, at the mean load of the workload; None where there are no such tokens."""

    input: float | None
    cached: float | None
    output: float | None
    all: float


def cost_per_hour(spec: Spec, layout: Layout) -> float:
    """Price of a layout for one hour; machines that are there anyway (count_min) are paid for."""
    used = dict.fromkeys((node.name for node in spec.gpu_node), 0)
    used[layout.prefill.node.name] += layout.prefill_nodes
    used[layout.decode.node.name] += layout.decode_nodes
    machines = sum(max(used[node.name], node.count_min) * node.price_per_hour for node in spec.gpu_node)
    return machines + layout.nodes * extras_per_hour(layout)


def extras_per_hour(layout: Layout) -> float:
    """Price of what one machine is given besides its GPUs."""
    return layout.dram.price_per_hour + layout.ssd.price_per_hour + layout.nic.price_per_hour


def token_prices(spec: Spec, layout: Layout, estimator: Estimator) -> TokenPrices:
    """Price per million input (computed), cached and output tokens."""
    demand = estimator.demand
    admitted, _ = estimator.admitted(layout)
    rows = estimator.rows(admitted)
    cached = estimator.first_tokens(layout, admitted).cached
    a, b, c, d = layout.prefill.prefill
    load_s = float((d * cached).sum())
    tokens, answers = demand.input_tokens[rows], demand.output_tokens[rows]
    work_s = float((a + b * (tokens - cached) + c * (tokens**2 - cached**2)).sum())
    share = load_s / (load_s + work_s)
    total = cost_per_hour(spec, layout)
    output_part = layout.decode_nodes * layout.decode.node.price_per_hour
    pool = layout.nodes * (layout.dram.price_per_hour + layout.ssd.price_per_hour)
    network = layout.nodes * layout.nic.price_per_hour
    machines = total - output_part - pool - network
    hits = float(cached.sum())
    cached_part = (machines * share + pool + network / 2) if hits else 0.0
    input_part = total - output_part - cached_part
    hours = demand.span_s / HOUR_S
    return TokenPrices(
        input=per_million(input_part, float((tokens - cached).sum()) / hours),
        cached=per_million(cached_part, hits / hours),
        output=per_million(output_part, float(answers.sum()) / hours),
        all=total / (float(tokens.sum() + answers.sum()) / hours) * MILLION,
    )
