"""Where blocks lie enters the price: the memory of the instance's own host, other memory, disks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mooncache.client.results import BlockCopy, BlockTier, MapNodeState, NodeView
from mooncache.conductor.core.decisions import Decision, PoolAnswer, PoolState, SchedulingRequest
from mooncache.conductor.core.fleet_shape import SourceRates
from mooncache.conductor.core.handover_node import by_host
from mooncache.conductor.core.learning import LoadSource, load_source
from mooncache.conductor.core.placed import RUNS_MAX, PlacedRun, host_tokens, runs_of, sources, ssd_tokens
from mooncache.conductor.core.policy import branches
from mooncache.conductor.core.policy.fetching import fetch_row_s, fetch_s
from mooncache.conductor.core.policy.types import NO_ROW, Branch, PrefixSource, TransferCost
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.core.snapshot import take
from mooncache.kvcache.block_index import native_index
from mooncache.kvcache.leg_hint import LoadedFrom
from tests.conductor.fleets import Row, choose, fleet, near, request
from tests.conductor.support import BLOCK, chain, loaded, scheduler_settings

WARM_A, WARM_B = BlockCopy("node-a", BlockTier.DRAM), BlockCopy("node-b", BlockTier.DRAM)
COLD_A = BlockCopy("node-a", BlockTier.SSD)
HOSTS = {"node-a": "host-a", "node-b": "host-b"}
ON_A, ON_BOTH = frozenset({"host-a"}), frozenset({"host-a", "host-b"})


def test_blocks_that_lie_alike_are_one_run() -> None:
    warm, both, cold = (WARM_A,), (WARM_B, WARM_A), (WARM_B, COLD_A)
    copies = (warm, warm, both, (COLD_A,), cold, warm)
    assert runs_of(copies, 5, HOSTS) == (
        PlacedRun(2, False, ON_A),
        PlacedRun(1, False, ON_BOTH),
        PlacedRun(1, True, frozenset()),
        PlacedRun(1, False, frozenset({"host-b"})),
    ), "a copy in memory counts, wherever another one is"
    many = tuple((copy,) for copy in (WARM_A, WARM_B) * RUNS_MAX)
    found = runs_of(many, len(many), HOSTS)
    assert len(found) == RUNS_MAX
    assert sum(run.blocks for run in found) == len(many), "no block is left out"
    assert runs_of((), 3, HOSTS) == (), "an older pool says nothing"


def test_what_a_row_holds_itself_is_not_read_anywhere() -> None:
    runs = (PlacedRun(2, False, ON_A), PlacedRun(2, True, frozenset()), PlacedRun(4, False, ON_BOTH))
    local = np.array([0, 3 * BLOCK, 8 * BLOCK], dtype=np.int64)
    cold = ssd_tokens(runs, local, BLOCK, 7 * BLOCK)
    assert cold is not None and cold.tolist() == [2 * BLOCK, BLOCK, 0]
    here = host_tokens(runs, local, BLOCK, 7 * BLOCK, {"host-a": [0], "host-b": [1, 2]})
    assert here is not None and here.tolist() == [5 * BLOCK, 3 * BLOCK, 0]
    assert ssd_tokens(runs[:1], local, BLOCK, 2 * BLOCK) is None
    assert host_tokens(runs[1:2], local, BLOCK, 2 * BLOCK, {"host-a": [0]}) is None
    assert sources((), local, BLOCK, 32, {}) == (PrefixSource(NO_ROW, 32),)


def test_one_row_costs_what_it_costs_in_the_column() -> None:
    source = random.Random(7)
    for _ in range(300):
        rows = tuple(
            Row(
                transfer=TransferCost(source.uniform(0, 0.1), 10 ** source.uniform(3, 6)),
                source_rates=SourceRates(10 ** source.uniform(3, 7), 10 ** source.uniform(2, 6)),
                local_tokens=source.randrange(0, 4096, BLOCK),
            )
            for _ in range(4)
        )
        held = np.array([row.local_tokens for row in rows], dtype=np.int64)
        missing = np.maximum(4096 - held, 0)
        shares = [np.array([source.random() for _ in rows]) for _ in range(2)]
        here, cold = (
            None if source.random() < 0.3 else (missing * share).astype(np.int64) for share in shares
        )
        rate, ssd_rate = 10 ** source.uniform(3, 6), 10 ** source.uniform(3, 6)
        offered = PrefixSource(NO_ROW, 4096, rate, ssd_rate, here, cold)
        priced = fleet(*rows)
        seconds = fetch_s(priced, offered, missing.astype(np.float64))
        for row in range(len(rows)):
            alone = fetch_row_s(priced, row, offered, int(missing[row]))
            assert near(alone, float(priced.fetch_latency_s[row] + seconds[row]))
            assert alone >= rows[row].transfer.latency_s


def test_the_slowest_part_sets_the_time() -> None:
    rows = (Row(transfer=TransferCost(0.0, 1000.0), source_rates=SourceRates(8000.0, 500.0)),)
    four = np.array([4000], dtype=np.int64)

    def seconds(here: int, cold: int) -> float:
        offered = PrefixSource(NO_ROW, 4000, on_host=four * 0 + here, on_ssd=four * 0 + cold)
        return fetch_row_s(fleet(*rows), 0, offered, 4000)

    assert near(seconds(0, 0), 4.0)
    assert near(seconds(4000, 0), 0.5)
    assert near(seconds(2000, 0), 2.0), "both parts at once"
    assert near(seconds(0, 1000), 4.0), "the disk is not what it waits for"
    assert near(seconds(0, 4000), 8.0)


def test_what_lies_on_a_slow_disk_is_computed_and_what_lies_near_is_fetched() -> None:
    everything = np.array([4096, 4096], dtype=np.int64)

    def branch(link_tokens_per_s: float, source: PrefixSource) -> Branch:
        one = Row(transfer=TransferCost(0.0, link_tokens_per_s), source_rates=SourceRates(1e6, 1000.0))
        return choose((one.but(name="p"), one.but(name="d", role="decode")), 4200, sources=(source,)).branch

    pool = PrefixSource(NO_ROW, 4096)
    assert branch(20_000.0, pool) is Branch.FETCH
    assert branch(20_000.0, pool._replace(on_ssd=everything)) is Branch.LOCAL
    assert branch(1000.0, pool) is Branch.LOCAL
    assert branch(1000.0, pool._replace(on_host=everything)) is Branch.FETCH


def test_of_two_sources_each_row_takes_the_one_that_is_faster_for_it() -> None:
    slow, fast = SourceRates(1e6, 1000.0), SourceRates(1e6, 1e6)
    rows = (Row("a", source_rates=slow), Row("b", source_rates=fast), Row("c"), Row("d"))
    cold = PrefixSource(2, 4096, 1e6, on_ssd=np.full(4, 4096, dtype=np.int64))
    asked = request(rows, 4200, sources=(cold, PrefixSource(3, 4096, 5e4)))
    rules = scheduler_settings().rules
    priced = branches.scores(asked, fleet(*rows), rules)
    for row, expected in enumerate((3, 2)):
        best = branches.cheapest(branches.options(asked, fleet(*rows), rules, row))
        assert best.source_row == expected
        assert near(best.score_s, float(priced.score_s[row]))


def test_a_snapshot_keeps_where_blocks_lie() -> None:
    rows = (Row("a", source_rates=SourceRates(2e5, 3e4)), Row("b"), Row("c"))
    some = np.array([16, 32, 48], dtype=np.int64)
    asked = request(rows, 4200, sources=(PrefixSource(NO_ROW, 64, 1e5, 2e4, some, some + 1),))
    kept = take(fleet(*rows), asked, 0.0, np.array([0, 2]))
    found = kept.policy_request().sources[0]
    assert found.on_host is not None and found.on_host.tolist() == [16, 48]
    assert found.on_ssd is not None and found.on_ssd.tolist() == [17, 49]
    assert found.ssd_tokens_per_s == 2e4
    assert kept.fleet().host_tokens_per_s[0] == np.float32(2e5)


@pytest.mark.parametrize(
    ("places", "source"),
    [
        ((), LoadSource.REMOTE),
        ((("a", "dram", 10),), LoadSource.HOST),
        ((("b", "dram", 10),), LoadSource.REMOTE),
        ((("a", "ssd", 9), ("b", "dram", 1)), LoadSource.SSD),
        ((("a", "ssd", 5), ("b", "dram", 5)), None),
    ],
)
def test_a_load_teaches_of_the_source_that_nearly_all_of_it_had(
    places: tuple[tuple[str, str, int], ...], source: LoadSource | None
) -> None:
    assert load_source([LoadedFrom(*place) for place in places], {"a"}) is source


NODE = NodeView(
    index=0,
    node_id="node-a",
    host_id="host-a",
    incarnation=1,
    state=MapNodeState.ACTIVE,
    tcp_host="127.0.0.1",
    tcp_port=1,
    unix_path="",
)


def decided(core: Scheduler, runs: tuple[PlacedRun, ...], now_s: float) -> Decision:
    asked = SchedulingRequest(f"r{now_s}", "m", 40 * BLOCK, keys=chain("x", 40), max_output_tokens=8)
    pool = PoolAnswer(PoolState.OK, 32, nodes=by_host([NODE]), runs=runs)
    decision = core.schedule(asked, pool, now_s, 0.0)
    assert decision.choice.admitted
    return decision


def test_what_engines_loaded_from_disks_prices_disks_and_not_memory() -> None:
    core = Scheduler(scheduler_settings(), random.Random(1), native_index)
    info = InstanceInfo(
        "a", 1, "both", "m", group=5, kv_bytes_per_token=1000, block_tokens=BLOCK, host_id="host-a"
    )
    core.register(info, InstanceState.READY, 0.0)
    warm, cold = (PlacedRun(32, False, ON_A),), (PlacedRun(32, True, frozenset()),)
    for number in range(1, 9):
        loaded(
            core, decided(core, cold, 10.0 * number), LoadedFrom("node-a", "ssd", 32), 4.0, 10.0 * number + 5
        )
        loaded(
            core,
            decided(core, warm, 10.0 * number + 6),
            LoadedFrom("node-a", "dram", 32),
            0.01,
            10.0 * number + 7,
        )
    model = core.models.of("m")
    slow = model.from_ssd["a"].bytes_per_s.value
    fast = model.from_host["a"].bytes_per_s.value
    assert slow < 0.05 * fast
    assert "a" not in model.transfers, "nothing came from another host"
    from_memory, from_disk = decided(core, warm, 200.0), decided(core, cold, 201.0)
    taken = [
        fetch_row_s(core.models.of("m").book.view(202.0), 0, each.policy_request.sources[0], 32 * BLOCK)
        for each in (from_memory, from_disk)
    ]
    assert taken[1] > 5 * taken[0]
    core.check()
