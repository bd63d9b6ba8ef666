"""Lookups, loads and saves are spans of the request that wanted them, with what moved."""

from __future__ import annotations

import time
from collections.abc import Callable

from mooncache.config import Config
from mooncache.kvcache import mover as mv
from mooncache.kvcache.lookup import LookupRequest, Lookups
from mooncache.kvcache.pool_link import PoolLink
from mooncache.runtime import tracing
from tests.conditions import wait_until
from tests.kvcache.conftest import BLOCK_BYTES, WAIT_S, Engine
from tests.kvcache.faulty import FaultyPool
from tests.runtime.tracing.collector import Collector


def test_loads_and_saves_tell_blocks_and_bytes(traced: Config, collector: Collector) -> None:
    pool, engine = FaultyPool(), Engine()
    link = PoolLink(lambda: pool)
    assert link.connected.wait(WAIT_S)
    mover = mv.Mover(
        link,
        engine.memory,
        load_threads=1,
        save_threads=1,
        load_timeout_s=5.0,
        save_timeout_s=5.0,
        save_queue_bytes_max=64 * BLOCK_BYTES,
    )
    tracing.setup("engine", traced)
    keys = tuple(number.to_bytes(32, "big") for number in range(3))
    with tracing.span("engine.request", {}, kind="server") as request:
        context = request.context
    try:
        mover.save(mv.TransferJob("s", keys[:2], (0, 1), context))
        assert mover.wait_saved(WAIT_S)
        mover.load(mv.TransferJob("l", keys, (4, 5, 6), context))
        _until(mover, mover.take_loads)
        mover.load(mv.TransferJob("untraced", keys, (4, 5, 6)))
        _until(mover, mover.take_loads)
    finally:
        mover.close()
        link.close()
    tracing.flush()
    spans = {span.name: span for span in collector.wait_for(lambda spans: len(spans) >= 3)}
    assert len(collector.spans) == 3, "work that belongs to no request makes no trace"
    save, load = spans["kvcache.save"], spans["kvcache.load"]
    assert {save.trace_id, load.trace_id} == {context.trace_id}
    assert {save.parent_id, load.parent_id} == {context.span_id}
    assert save.attributes["kvcache.bytes"] == 2 * BLOCK_BYTES
    assert (save.attributes["kvcache.blocks"], save.attributes["kvcache.lost"]) == (2, 0)
    assert load.attributes["kvcache.blocks"] == 3
    assert load.attributes["kvcache.loaded_blocks"] == 2
    assert load.attributes["kvcache.bytes"] == 2 * BLOCK_BYTES
    assert load.attributes["kvcache.reason"] == "missing"


def test_a_lookup_is_a_span_until_its_answer(traced: Config, collector: Collector) -> None:
    pool = FaultyPool()
    link = PoolLink(lambda: pool)
    assert link.connected.wait(WAIT_S)
    lookups = Lookups(link, timeout_s=5.0)
    tracing.setup("engine", traced)
    keys = [number.to_bytes(32, "big") for number in range(3)]
    pool.blocks[keys[0]] = b""
    with tracing.span("engine.request", {}, kind="server") as request:
        context = request.context
    try:
        lookups.ask(LookupRequest("answered", b"".join(keys), trace=context))
        assert lookups.changed.wait(WAIT_S)
        lookups.ask(LookupRequest("withdrawn", keys[2], 1, time.monotonic() + WAIT_S, context))
        lookups.withdraw("withdrawn")
    finally:
        lookups.close()
        link.close()
    tracing.flush()
    spans = collector.wait_for(lambda spans: len(spans) >= 3)
    looked_up = [span for span in spans if span.name == "kvcache.lookup"]
    assert {(span.trace_id, span.parent_id) for span in looked_up} == {(context.trace_id, context.span_id)}
    answered, withdrawn = sorted(looked_up, key=lambda span: -span.attributes["kvcache.blocks"])
    assert (answered.attributes["kvcache.found_blocks"], answered.attributes["kvcache.reason"]) == (
        1,
        "found",
    )
    assert "kvcache.reason" not in withdrawn.attributes


def _until(mover: mv.Mover, take: Callable[[], list[mv.LoadReport]]) -> None:
    wait_until(take, "a report")
