"""Verified hits in a worker of vLLM: what compares its blocks with the pool's, and its counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mooncache.config import ConnectorSection
from mooncache.connectors.vllm.stats import SHADOW_DISTANCE, ConnectorStats
from mooncache.kvcache.distance import Comparison
from mooncache.kvcache.memory import BlockMemory
from mooncache.kvcache.mover import Mover
from mooncache.kvcache.pool_link import PoolLink
from mooncache.kvcache.verifier import ShadowReport, Verifier
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)


def make_verifier(
    connector: ConnectorSection,
    link: PoolLink,
    mover: Mover,
    memory: BlockMemory,
    by_group: Sequence[dict[str, Any]],
    heard: Callable[[ShadowReport], None],
) -> Verifier | None:
    """None: hits are not verified, or cannot be. `by_group` are the tensors of each group of KV cache."""
    if not connector.shadow_share:
        return None
    dtype = str(next(iter(by_group[0].values())).dtype).removeprefix("torch.")
    comparison = Comparison.of(dtype, len(by_group[0]), connector.shadow_tolerance)
    if comparison is None or len(by_group) > 1:
        why = f"KV of type {dtype} is not compared" if comparison is None else "blocks are in several parts"
        _log.warning(Event.CONNECTOR_SHADOW_OFF, reason=why)
        return None
    return Verifier(
        link, memory, comparison, saved=mover.report_save, heard=heard, timeout_s=connector.save_timeout_s
    )


def count_heard(heard: deque[ShadowReport], stats: ConnectorStats) -> None:
    """Take what was found since the last call into the counters."""
    while heard:
        report = heard.popleft()
        for outcome, blocks in report.counts().items():
            stats.count("shadow_blocks", blocks, outcome)
        for distance in report.distances:
            stats.seen(SHADOW_DISTANCE, distance)
