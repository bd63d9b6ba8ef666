"""Fleets and requests for tests of policies, made of plain rows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mooncache.conductor.core.fleet_book import FleetBook, InstanceShape
from mooncache.conductor.core.fleet_shape import SourceRates
from mooncache.conductor.core.policy import find
from mooncache.conductor.core.policy.fleet import DECODE, ROLES, Fleet
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    AdmissionMode,
    Awaited,
    Choice,
    DecodeCost,
    PrefillCost,
    PrefixSource,
    Request,
    Rules,
    TransferCost,
)

COST = PrefillCost(0.01, 1e-4, 1e-9, 1e-6)
DECODING = DecodeCost(0.02, 0.001, 1e-8)
FAST = TransferCost(0.001, 1e6)
NO_SOURCE_LIMITS = SourceRates()
OPEN = Rules(admission=AdmissionMode.NONE, pipelines=True, inline_tokens_max=512)


@dataclass(frozen=True)
class Row:
    """One instance; `local_tokens` belong to the request that is asked."""

    name: str = "i"
    role: str = "prefill"
    ready: bool = True
    prefill: PrefillCost = COST
    transfer: TransferCost = FAST
    source_rates: SourceRates = NO_SOURCE_LIMITS
    decode: DecodeCost = DECODING
    group: int = 0
    pool: bool = True
    local_tokens: int = 0
    queue_s: float = 0.0
    queue_tokens: float = 0.0
    queue_prompts: int = 0
    sequences: float = 0.0
    sequences_max: float = 0.0
    kv_tokens: float = 0.0
    kv_capacity_tokens: float = 0.0
    stay_s: float = 10.0
    pipeline: int = -1

    def but(self, **fields: Any) -> Row:
        return replace(self, **fields)


def pair() -> FleetBook:
    """A book of a prefill and a decode instance."""
    book = FleetBook()
    book.add("p", InstanceShape())
    book.add("d", InstanceShape(role=DECODE))
    return book


def fleet(*rows: Row) -> Fleet:
    """What a policy sees of the rows; batches shrink by e every `stay_s`."""

    def column(name: str, kind: Any = np.float64) -> Any:
        return np.array([getattr(row, name) for row in rows], dtype=kind)

    sequences, kv_tokens, stay_s = column("sequences"), column("kv_tokens"), column("stay_s")

    def predict(moments_s: Sequence[float]) -> Any:
        left = [np.exp(-after_s / np.maximum(stay_s, 1e-3)) for after_s in moments_s]
        return np.array([(sequences * each, kv_tokens * each) for each in left])

    costs = {
        f"prefill_{part}": np.array([getattr(row.prefill, part) for row in rows], dtype=np.float64)
        for part in "abcd"
    }
    return Fleet(
        now_s=0.0,
        names=[row.name for row in rows],
        role=np.array([ROLES[row.role] for row in rows], dtype=np.int64),
        ready=column("ready", np.bool_),
        group=column("group", np.int64),
        pool=column("pool", np.bool_),
        fetch_latency_s=np.array([row.transfer.latency_s for row in rows], dtype=np.float64),
        fetch_tokens_per_s=np.array([row.transfer.tokens_per_s for row in rows], dtype=np.float64),
        host_tokens_per_s=np.array([row.source_rates.host_tokens_per_s for row in rows], dtype=np.float64),
        ssd_tokens_per_s=np.array([row.source_rates.ssd_tokens_per_s for row in rows], dtype=np.float64),
        queue_s=column("queue_s"),
        queue_tokens=column("queue_tokens"),
        queue_prompts=column("queue_prompts", np.int64),
        decode_base_s=np.array([row.decode.base_s for row in rows], dtype=np.float64),
        decode_per_sequence_s=np.array([row.decode.per_sequence_s for row in rows], dtype=np.float64),
        decode_per_token_s=np.array([row.decode.per_token_s for row in rows], dtype=np.float64),
        sequences=sequences,
        sequences_max=column("sequences_max"),
        kv_tokens=kv_tokens,
        kv_capacity_tokens=column("kv_capacity_tokens"),
        batch_sequences=sequences,
        batch_kv_tokens=kv_tokens,
        stay_s=stay_s,
        handover_s=np.array([row.transfer.latency_s for row in rows], dtype=np.float64),
        handover_tokens_per_s=np.array([row.transfer.tokens_per_s for row in rows], dtype=np.float64),
        tail=np.ones(len(rows), dtype=np.bool_),
        pipeline=column("pipeline", np.int64),
        predict=predict,
        **costs,
    )


def request(rows: tuple[Row, ...], n: int = 4096, **fields: Any) -> Request:
    """A request of n tokens. pool_tokens: held by the store nodes; awaited: (tokens, seconds, name of the row)."""
    pool = fields.pop("pool_tokens", 0)
    place = {row.name: at for at, row in enumerate(rows)}
    awaited = tuple(
        Awaited(tokens, ready_in_s, place.get(name, NO_ROW))
        for tokens, ready_in_s, name in fields.pop("awaited", ())
    )
    exclude = frozenset(place[name] for name in fields.pop("exclude", ()) if name in place)
    keep = place.get(fields.pop("keep_decode", ""), NO_ROW)
    return Request(
        prompt_tokens=n,
        local=np.array([row.local_tokens for row in rows], dtype=np.int64),
        sources=(*fields.pop("sources", ()), *((PrefixSource(NO_ROW, pool),) if pool else ())),
        awaited=awaited,
        exclude=exclude,
        keep_decode=keep,
        **{"cacheable_tokens": n // 16 * 16, **fields},
    )


def choose(
    rows: tuple[Row, ...],
    n: int = 4096,
    *,
    rules: Rules = OPEN,
    seed: int = 0,
    policy: str = "mooncache",
    **fields: Any,
) -> Choice:
    return find(policy).choose(request(rows, n, **fields), fleet(*rows), rules, random.Random(seed))


def names(choice: Choice, rows: tuple[Row, ...]) -> tuple[str, str]:
    """(prefill instance or "", decode instance)."""
    assert choice.decode != NO_ROW
    return rows[choice.prefill].name if choice.prefill != NO_ROW else "", rows[choice.decode].name


def near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
