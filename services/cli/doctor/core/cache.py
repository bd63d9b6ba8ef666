"""Whether the cache helps, and where it does not: why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mooncache.cli.doctor.core.facts import NodeFacts, PoolFacts, ServingFacts
from mooncache.cli.doctor.core.result import CheckResult, passed, skipped, warned

READS_MIN = 1000
HOT_SHARE = 0.5
HOT_FACTOR = 2.0
LOOKUPS_MIN = 500
HITS_MIN = 0.3
EVICTED_SHARE = 0.2
TENANT_SHARE = 0.8
REQUESTS_MIN = 20
REASONS_SHOWN = 3
BROKEN_SHARE = 0.2
BROKEN = ("pool_unreachable", "load_failed", "timed_out")


def hot_node(pool: PoolFacts) -> CheckResult:
    """One node that gives most of the bytes."""
    read = {node.node_id: node.counters.get("hits", 0) for node in pool.nodes if node.counters}
    total = sum(read.values())
    if len(read) < 2 or total < READS_MIN:
        return skipped("hot node", "pool", f"{total} reads of {len(read)} nodes say too little")
    name = max(read, key=lambda node: read[node])
    share = read[name] / total
    if share > HOT_SHARE and share > HOT_FACTOR / len(read):
        text = f"gives {share:.0%} of all reads, of {len(read)} nodes"
        fix = (
            "copy hot prefixes (conductor.replicate_bytes_per_s), or `mooncache tenant set NAME --replicas 2`"
        )
        return warned("hot node", name, text, fix)
    return passed("hot node", "pool", f"the busiest of {len(read)} nodes gives {share:.0%} of the reads")


def hit_ratio(pool: PoolFacts, serving: ServingFacts | None) -> Iterator[CheckResult]:
    """Lookups of blocks that were found; when few are, each reason that the figures show."""
    counted = [node for node in pool.nodes if node.counters]
    hits = _sum(counted, "store_hits")
    evicted = _sum(counted, "store_misses_evicted")
    unknown = _sum(counted, "store_misses_unknown")
    total = hits + evicted + unknown
    if total < LOOKUPS_MIN:
        yield skipped("hit ratio", "pool", f"{total} lookups say too little")
        return
    ratio = hits / total
    if ratio >= HITS_MIN:
        yield passed("hit ratio", "pool", f"{ratio:.0%} of {total} lookups found their block")
        return
    reasons = list(_reasons(counted, pool, serving, evicted / total))
    for why, fix in reasons or [("prompts share few prefixes: most blocks were never here", _PREFIX_FIX)]:
        yield warned("hit ratio", "pool", f"{ratio:.0%} of {total} lookups found their block: {why}", fix)


_PREFIX_FIX = (
    "put what is equal first in prompts (system text before date and user); `mooncache why ID` shows misses"
)


MISS_FIXES = {
    "never_seen": _PREFIX_FIX,
    "evicted": "more memory (store_node.capacity_bytes, nodes) or disks (store_node.ssd_bytes)",
    "other_tenant": "tenants share nothing but what they declare public (gateway.public_prefix_enabled)",
    "other_passport": "start engines of one model with equal settings; the check `passports` names the field",
    "not_worth_fetching": "loads are priced slower than computing: see the links between engines and nodes",
    "computed_faster": "engines measure that computing is faster: see the links between engines and nodes",
    "load_cut": "loads turn out slow: see the links between engines and nodes (`mooncache bench transfer`)",
    "pool_unreachable": "see the checks of network and pool above",
    "load_failed": "see the probe blocks above, and the engines' logs",
    "timed_out": "blocks came late: see load of the prefill engines, and the probe blocks above",
    "cache_off": "set connector.enabled, or give an attached vLLM the connector (docs/vllm-connector.md)",
}


def _reasons(
    counted: list[NodeFacts], pool: PoolFacts, serving: ServingFacts | None, evicted_share: float
) -> Iterator[tuple[str, str]]:
    if evicted_share > EVICTED_SHARE:
        unlimited = _sum(counted, "store_sampled_unlimited") / max(1, _sum(counted, "store_sampled_asked"))
        text = f"{evicted_share:.0%} were here and had been evicted"
        if unlimited:
            text += f"; with unlimited memory {unlimited:.0%} would have been found"
        yield text, "more memory (store_node.capacity_bytes, nodes) or disks (store_node.ssd_bytes)"
    if serving is not None:
        apart = sorted(str(row["instance_id"]) for row in serving.instances if row.get("apart"))
        if apart:
            text = f"{', '.join(apart)} cannot share blocks with the other engines of the model"
            yield (
                text,
                "start engines of one model with equal settings; the check `passports` names the field",
            )
    largest = _largest_without_share(pool)
    if largest:
        yield largest, "give the others shares: `mooncache tenant set NAME --share 2GiB`, or this one a quota"


def _largest_without_share(pool: PoolFacts) -> str:
    """A tenant that holds nearly everything while others, which miss, have no share; "" when there is none."""
    tenants = pool.tenants or {}
    held = sum(use.memory_bytes for use in tenants.values())
    if len(tenants) < 2 or not held:
        return ""
    name = max(tenants, key=lambda tenant: tenants[tenant].memory_bytes)
    others = [other for other in tenants if other != name]
    starving = [
        other
        for other in others
        if not tenants[other].share_bytes and tenants[other].misses > tenants[other].hits
    ]
    if tenants[name].memory_bytes < held * TENANT_SHARE or not starving:
        return ""
    part = tenants[name].memory_bytes / held
    return f"tenant {name} holds {part:.0%} of the memory, and {', '.join(starving[:4])} no share"


def prompts(serving: ServingFacts) -> Iterator[CheckResult]:
    """Prompt tokens of the last requests that were not computed; when few are, the reasons that `why` gives."""
    ended = [
        record
        for record in serving.decisions
        if (record.get("observed") or {}).get("computed_tokens") is not None
    ]
    asked = sum(int(record.get("cacheable_tokens") or 0) for record in ended)
    if len(ended) < REQUESTS_MIN or not asked:
        yield skipped("cached prompts", "serving", f"{len(ended)} requests say too little")
        return
    computed = sum(int(record["observed"]["computed_tokens"]) for record in ended)
    whole = sum(int(record.get("prompt_tokens") or 0) for record in ended)
    share = max(0.0, 1 - computed / whole) if whole else 0.0
    text = f"{share:.0%} of the prompt tokens of the last {len(ended)} requests came from a cache"
    missed: Counter[str] = Counter()
    for record in serving.decisions:
        for miss in record.get("misses", ()):
            missed[str(miss["reason"])] += int(miss["to_token"]) - int(miss["from_token"])
    broken = {reason: missed[reason] for reason in BROKEN if missed[reason]}
    if share >= HITS_MIN and sum(broken.values()) <= sum(missed.values()) * BROKEN_SHARE:
        yield passed("cached prompts", "serving", text)
        return
    named = [reason for reason, _ in missed.most_common(REASONS_SHOWN) if reason in MISS_FIXES]
    for reason in named or ["never_seen"]:
        part = missed[reason] / max(1, sum(missed.values()))
        yield warned(
            "cached prompts",
            "serving",
            f"{text}; {part:.0%} of what was missed: {reason}",
            MISS_FIXES[reason],
        )


def _sum(nodes: list[NodeFacts], counter: str) -> int:
    return sum(node.counters.get(counter, 0) for node in nodes)
