"""What an instance is in the book of instances, and the names of the book's columns.

Costs are learnt from what engines report. Invalid costs are refused before they enter the book (`possible`): a NaN in
the expected load would stay there until the last request with it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from mooncache.conductor.core.policy.fleet import PREFILL
from mooncache.conductor.core.policy.types import DecodeCost, PrefillCost, TransferCost

FLOATS = (
    "prefill_a",
    "prefill_b",
    "prefill_c",
    "prefill_d",
    "fetch_latency_s",
    "fetch_tokens_per_s",
    "host_tokens_per_s",
    "ssd_tokens_per_s",
    "queue_tokens",
    "decode_base_s",
    "decode_per_sequence_s",
    "decode_per_token_s",
    "sequences",
    "sequences_max",
    "kv_tokens",
    "kv_capacity_tokens",
    "batch_sequences",
    "batch_kv_tokens",
    "stay_s",
    "handover_s",
    "handover_tokens_per_s",
    "pending_s",
    "running_s",
    "since_s",
    "foreign_s",
    "foreign_sequences",
    "foreign_kv_tokens",
    "reported_kv_tokens",
    "own_sequences",
    "own_kv_tokens",
    "link_tokens_per_s",
    "host_link_tokens_per_s",
    "max_model_tokens",
)
INTS = ("role", "group", "kind", "queue_prompts", "pipeline", "fetching")
BOOLS = ("ready", "pool", "tail")
# Columns that hold a field of `InstanceShape` as it is, and those that hold the parts of a cost, in its order.
SHAPE_COLUMNS = (
    "role",
    "ready",
    "group",
    "pool",
    "sequences_max",
    "kv_capacity_tokens",
    "pipeline",
    "tail",
    "kind",
    "max_model_tokens",
)
_PREFILL = ("prefill_a", "prefill_b", "prefill_c", "prefill_d")
_DECODE = ("decode_base_s", "decode_per_sequence_s", "decode_per_token_s")
_TRANSFER = ("fetch_latency_s", "link_tokens_per_s")
_RATES = ("host_link_tokens_per_s", "ssd_tokens_per_s")
_HANDOVER = ("handover_s", "handover_tokens_per_s")


class SourceRates(NamedTuple):
    """Tokens per second into an instance from sources that its link does not limit alone; infinite: no limit."""

    host_tokens_per_s: float = math.inf  # from the memory of its host
    ssd_tokens_per_s: float = math.inf  # from the disks of store nodes


NO_SOURCE_LIMITS = SourceRates()


class InstanceShape(NamedTuple):
    """What an instance is, as far as requests do not change it. A limit of 0 means no limit."""

    role: int = PREFILL
    prefill: PrefillCost = PrefillCost(0.0666, 1.1003e-4, 7.386e-10, 2.618e-6)
    transfer: TransferCost = TransferCost(0.005, 265_000.0)  # into the instance
    source_rates: SourceRates = NO_SOURCE_LIMITS
    decode: DecodeCost = DecodeCost(0.0263, 0.00021, 3.4e-8)
    group: int = 0
    pool: bool = True
    sequences_max: int = 0
    kv_capacity_tokens: int = 0
    pipeline: int = -1
    handover: TransferCost = TransferCost(0.0, float("inf"))
    """From the end of a prefill elsewhere to the first decode step."""
    tail: bool = False  # it computes what is behind the last complete block
    ready: bool = True
    kind: int = 0  # number of the type of instance; those of one kind compute equally fast
    max_model_tokens: int = 0


def possible(value: object) -> bool:
    """True for a plausible shape: costs are finite and not negative; only a rate may be infinite, never 0."""
    if isinstance(value, TransferCost):
        return possible(value.latency_s) and value.tokens_per_s > 0
    if isinstance(value, SourceRates):
        return all(rate > 0 for rate in value)
    if isinstance(value, PrefillCost | DecodeCost):
        return all(possible(float(part)) for part in value)
    return not isinstance(value, float) or 0.0 <= value < math.inf


def believed(shape: InstanceShape) -> InstanceShape:
    """The shape with the usual costs in place of implausible ones."""
    usual = InstanceShape()
    return shape._replace(
        prefill=shape.prefill if possible(shape.prefill) else usual.prefill,
        transfer=shape.transfer if possible(shape.transfer) else usual.transfer,
        source_rates=shape.source_rates if possible(shape.source_rates) else usual.source_rates,
        decode=shape.decode if possible(shape.decode) else usual.decode,
        handover=shape.handover if possible(shape.handover) else usual.handover,
    )


def cost_cells(
    prefill: PrefillCost | None = None,
    decode: DecodeCost | None = None,
    transfer: TransferCost | None = None,
    handover: TransferCost | None = None,
    source_rates: SourceRates | None = None,
) -> Iterator[tuple[str, float]]:
    """(column, value) of every part of the costs that are given and plausible."""
    given = (
        (_PREFILL, prefill),
        (_DECODE, decode),
        (_TRANSFER, transfer),
        (_HANDOVER, handover),
        (_RATES, source_rates),
    )
    for columns, cost in given:
        if cost is not None and possible(cost):
            yield from zip(columns, cost, strict=True)
