"""What one request cost, and what caches saved of it, from the record of its decision and a price book.

Seconds come from the record's line of time. Computing a prompt takes an engine as long as it was seen to; generating
takes its share of the batch, as large as it was when the request was scheduled. Waits, queues and loads take no engine:
it works for others meanwhile. Bytes that were loaded from the pool cost the network, also within a host.

Saved is what the conductor's cost model said, when it scheduled the request, that the whole prompt would take to
compute, less what was computed and loaded. It may be negative: then the cache cost more than it gave. Without a cached
token nothing is saved, whatever the model said. What the record does not tell is not counted, and `gaps` says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mooncache.accounts.core.usage import WorkClass
from mooncache.kvcache.leg_hint import LegRole
from mooncache.kvcache.span_part import SpanPart
from mooncache.prices.core.price_book import EngineHour, PriceBook

_HOUR_S: Final = 3600.0
_DISKS: Final = frozenset({"ssd", "shared"})
ENDED: Final = frozenset({"finished", "failed", "aborted"})
"""States of which a record is complete."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Money that caches saved, by where the tokens came from."""

    engine: float = 0.0  # the engine's own cache
    dram: float = 0.0
    ssd: float = 0.0

    @property
    def total(self) -> float:
        return self.engine + self.dram + self.ssd


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Money in the book's currency; tokens; seconds of instances."""

    request_id: str
    tenant: str
    input_tokens: int  # computed ones
    cached_tokens: int
    output_tokens: int
    prefill_s: float
    decode_s: float  # shares of batches
    loaded_gb: float
    prefill: float
    decode: float
    network: float
    saved_s: float | None  # None: not known
    saved: Saved | None
    gaps: tuple[str, ...] = ()
    estimates: tuple[str, ...] = field(default=())
    work_class: WorkClass = WorkClass.ONLINE

    @property
    def total(self) -> float:
        """The request's own cost; storage belongs to tenants, because it is not known how long its blocks are kept."""
        return self.prefill + self.decode + self.network


@dataclass(slots=True)
class _RequestSeconds:
    """Seconds of a request by instance, and the legs' last cache reports."""

    prefill_s: dict[str, float] = field(default_factory=dict)
    decode_s: dict[str, float] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)
    estimates: list[str] = field(default_factory=list)


def price_of_request(
    record: Mapping[str, Any], book: PriceBook, engines: Mapping[str, EngineHour]
) -> RequestCost:
    """The cost of the request of a record. engines: price of an hour of each known instance, by name."""
    work = _work(record)
    caches = _caches(record)
    gaps, estimates = work.gaps, work.estimates
    observed, expected = record.get("observed") or {}, record.get("expected") or {}
    prompt = int(record["prompt_tokens"])
    cached = _cached_tokens(record, prompt)
    if cached is None:
        gaps.append("no engine said how much of the prompt was cached")
    # A prompt is computed by one replica; the batch, of which a request is a share, is that of all of them.
    one = {name: hour._replace(price=hour.replica_price) for name, hour in engines.items()}
    prefill = sum(_money(name, s, one, gaps) for name, s in work.prefill_s.items())
    decode = sum(_money(name, s, engines, gaps) for name, s in work.decode_s.items())
    loaded_gb = sum(_number(cache.get("loaded_bytes")) for _, cache in caches) / 1e9
    network = loaded_gb * (book.network_gb or 0.0)
    prefill_s = sum(work.prefill_s.values())
    saved_s, saved = _saved(expected, work.prefill_s, cached, (prefill, network), one, record)
    if saved_s is None and cached:
        gaps.append("what the prompt would have cost without a cache is not known")
    elif saved_s is not None and saved is not None and saved.total < 0:
        estimates.append("computing and loading took longer than computing the whole prompt was expected to")
    return RequestCost(
        request_id=str(record.get("request_id", "")),
        tenant=str(record.get("tenant", "")),
        input_tokens=prompt - (cached or 0),
        cached_tokens=cached or 0,
        output_tokens=int(_number(observed.get("output_tokens"))),
        prefill_s=prefill_s,
        decode_s=sum(work.decode_s.values()),
        loaded_gb=loaded_gb,
        prefill=prefill,
        decode=decode,
        network=network,
        saved_s=saved_s,
        saved=saved,
        gaps=tuple(dict.fromkeys(gaps)),
        estimates=tuple(dict.fromkeys(estimates)),
        work_class=WorkClass.OFFLINE if record.get("offline") is True else WorkClass.ONLINE,
    )


def _work(record: Mapping[str, Any]) -> _RequestSeconds:
    """Seconds of prefill and decode by instance."""
    work = _RequestSeconds()
    observed, expected = record.get("observed") or {}, record.get("expected") or {}
    chosen = record.get("chosen") or {}
    spans = record.get("spans") or ()
    whole = observed.get("streamed") is False
    share = _share(record, expected, work)
    decoder = str(chosen.get("decode", ""))
    computed_apart = any(
        span["leg"] == LegRole.PREFILL and span["part"] == SpanPart.COMPUTE for span in spans
    )
    for span in spans:
        seconds, part, name = (span["to_ms"] - span["from_ms"]) / 1e3, span["part"], str(span["instance"])
        if part == SpanPart.GENERATE:
            _add(work.decode_s, name, seconds * share)
        elif span["leg"] == LegRole.DECODE and part in (SpanPart.COMPUTE, SpanPart.UNKNOWN):
            if whole:  # one stretch of computing and generating: the first token's time is not known
                computing_s = 0.0 if computed_apart else _number(expected.get("prefill_ms")) / 1e3
                computing_s = min(computing_s, seconds)
                _add(work.decode_s, name, (seconds - computing_s) * share)
                work.estimates.append("not streamed: the plan says how much of it was computing")
            elif part == SpanPart.COMPUTE:
                computing_s = seconds
            else:
                computing_s = min(_number(observed.get("prefill_ms")) / 1e3, seconds)
                if computed_apart:
                    computing_s = 0.0
                work.gaps.append(f"{name} did not say what its cache did: waiting may count as computing")
            _add(work.prefill_s, name, computing_s)
        elif part == SpanPart.COMPUTE:
            _add(work.prefill_s, name, seconds)
    if not spans and decoder:
        work.gaps.append("no leg was reported")
    return work


def _share(record: Mapping[str, Any], expected: Mapping[str, Any], work: _RequestSeconds) -> float:
    """The request's share of the decode batch, above 0 and at most 1."""
    batch = _number(expected.get("decode_sequences"))
    own = max(1.0, _number(record.get("sequences")))
    if batch < own:
        work.estimates.append("the size of the decode batch is not known: the whole engine is counted")
        return 1.0
    return own / batch


def _saved(
    expected: Mapping[str, Any],
    prefill_s: Mapping[str, float],
    cached: int | None,
    spent: tuple[float, float],
    engines: Mapping[str, EngineHour],
    record: Mapping[str, Any],
) -> tuple[float | None, Saved | None]:
    """Seconds and money saved; None where not known."""
    if cached == 0:
        return 0.0, Saved()
    whole_ms = expected.get("without_cache_ms")
    if (
        cached is None
        or not isinstance(whole_ms, (int, float))
        or not math.isfinite(whole_ms)
        or not prefill_s
    ):
        return None, None
    chosen = record.get("chosen") or {}
    computer = str(chosen.get("prefill") or chosen.get("decode") or "")
    hour = engines.get(computer)
    saved_s = whole_ms / 1e3 - sum(prefill_s.values())
    if hour is None or hour.price is None:
        return saved_s, None
    prefill, network = spent
    money = whole_ms / 1e3 * hour.price / _HOUR_S - prefill - network
    return saved_s, _split(money, _sources(record))


def _split(money: float, tokens: Mapping[str, float]) -> Saved:
    total = sum(tokens.values())
    if not total:
        return Saved(dram=money)
    return Saved(**{name: money * count / total for name, count in tokens.items()})


def _sources(record: Mapping[str, Any]) -> dict[str, float]:
    """Cached tokens of the leg that computed the prompt, by where they came from."""
    computing = (record.get("chosen") or {}).get("prefill")
    role = LegRole.PREFILL if computing else LegRole.DECODE
    cache: Mapping[str, Any] = next((cache for leg, cache in reversed(_caches(record)) if leg == role), {})
    loaded = _number(cache.get("loaded_tokens"))
    blocks = {"dram": 0.0, "ssd": 0.0}
    for _, tier, count in cache.get("loaded_from") or ():
        blocks["ssd" if tier in _DISKS else "dram"] += count
    known = sum(blocks.values())
    on_disk = loaded * blocks["ssd"] / known if known else 0.0
    return {"engine": _number(cache.get("local_tokens")), "dram": loaded - on_disk, "ssd": on_disk}


def _caches(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What was said last of the cache of each leg."""
    found: dict[tuple[str, str, float], Mapping[str, Any]] = {}
    for event in record.get("events") or ():
        for leg in event.get("legs") or ():
            if leg.get("cache") is not None:
                found[leg["leg"], leg["instance"], leg["sent_ms"]] = leg["cache"]
    return [(name[0], cache) for name, cache in found.items()]


def _cached_tokens(record: Mapping[str, Any], prompt: int) -> int | None:
    """Prompt tokens that were not computed for the request; None: not known."""
    for event in reversed(record.get("events") or ()):
        if event.get("cached_tokens") is not None and event["cached_tokens"] >= 0:
            return min(int(event["cached_tokens"]), prompt)
    computed = (record.get("observed") or {}).get("computed_tokens")
    return max(0, prompt - int(computed)) if computed is not None else None


def _money(name: str, seconds: float, engines: Mapping[str, EngineHour], gaps: list[str]) -> float:
    hour = engines.get(name)
    if hour is None:
        gaps.append(f"{name} is no longer registered: its time has no price")
        return 0.0
    return seconds / _HOUR_S * (hour.price or 0.0)


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    if seconds > 0:
        sums[name] = sums.get(name, 0.0) + seconds


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0.0
