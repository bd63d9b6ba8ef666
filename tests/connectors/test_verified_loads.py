"""Hits that vLLM computes all the same, under its own scheduler: what is compared, and what becomes of what differs."""

from __future__ import annotations

import pytest

from mooncache.connectors.vllm.core.book import RequestBook
from mooncache.kvcache.core.shadow import VERIFIED, ShadowSampler
from mooncache.kvcache.leg_hint import CacheOutcome
from tests.connectors.harness import BLOCK_TOKENS, Make, ask, expected, prompt, warm
from tests.connectors.test_core import PASSPORT, SIZE
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
ALL = {"mooncache.shadow_share": 1.0, "mooncache.shadow_tokens_per_s": 1e6}


def test_what_is_the_same_is_counted_and_nothing_is_loaded(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(61, 6 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make(ALL, max_tokens_step=80)
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["loaded_tokens"], reported["reason"]) == (0, VERIFIED)
    assert engine.counted["shadow_blocks:same"] == 6
    assert engine.counted["shadow_blocks:different"] == 0
    assert engine.counted["shadow_tokens"] == 6 * BLOCK_TOKENS
    assert engine.leaked_blocks == 0
    assert not faulty.wrong
    engine.add("again", tokens, ask=ask())
    engine.run()
    assert engine.counted["shadow_blocks:same"] == 6, "what lies in its own cache is no hit of the pool"


@pytest.mark.parametrize("hooks", [False, True])
def test_what_differs_is_reported_and_the_request_is_right(
    make: Make, faulty: FaultyPool, *, hooks: bool
) -> None:
    tokens = prompt(62, 5 * BLOCK_TOKENS + 3)
    bad = make()
    bad.seed = 3  # it computes other KV than its weights say
    bad.add("warm", tokens)
    bad.run()
    before = len(faulty.blocks)
    engine = make({**ALL, "mooncache.layerwise": hooks}, hooks=hooks)
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.counted["shadow_blocks:different"] == 5
    keys = [key for found, _ in faulty.wrong for key in found]
    assert len(keys) == 5
    assert all(found.distance > found.tolerance and found.dtype == "float32" for _, found in faulty.wrong)
    assert len(faulty.blocks) == before - 5
    assert engine.counted["dropped_blocks:different"] == 5
    assert engine.leaked_blocks == 0


def test_a_pool_that_breaks_leaves_blocks_unchecked(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(63, 4 * BLOCK_TOKENS + 3)
    warm(make, tokens)
    engine = make(ALL)
    engine.add("r", tokens, ask=ask())
    engine.run_until(lambda: bool(engine.counted.get("shadow_tokens")))
    faulty.error = RuntimeError("gone")
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.counted["shadow_blocks:unchecked"] == 4
    assert engine.leaked_blocks == 0


def hit(role: str = "both", *, running: bool = False) -> RequestBook:
    """A book whose request `r` of three blocks and a token has been answered: the pool has all of them."""
    found = RequestBook([PASSPORT])
    found.add("r", list(range(3 * SIZE + 1)), salt="", params={"mooncache": {"v": 1, "role": role}})
    assert found.match("r", 0, 0.0, pool_usable=True).tokens is None
    found.answered("r", [True] * 3, CacheOutcome.UNKNOWN, 0.0, 0.0)
    if running:
        found.due("r", 3 * SIZE + 1, SIZE)
    assert found.match("r", 0, 0.0, pool_usable=True).tokens == 3 * SIZE
    return found


def test_verified_blocks_are_ordered_before_others_and_by_themselves() -> None:
    sampler = ShadowSampler(1.0, 1e6)
    found = hit()
    assert found.verify("r", 2 * SIZE, sampler, 0.0, 0.0)
    assert found.match("r", 0, 0.0, pool_usable=True).tokens == 0, "it is computed"
    tokens, table = list(range(3 * SIZE + 1)), [[1, 2, 3, 4]]
    order = found.plan_save("r", tokens, 3 * SIZE + 1, table, 9)
    assert order is not None
    assert (order.blocks, order.verifies) == ((1, 2), True)
    assert found.plan_save("r", tokens, 3 * SIZE + 1, table, 9) is None, "the third one is in the pool"
    found.check()


def test_neither_decode_legs_nor_preempted_requests_are_verified() -> None:
    sampler = ShadowSampler(1.0, 1e6)
    assert not hit("decode").verify("r", 3 * SIZE, sampler, 0.0, 0.0)
    assert not hit(running=True).verify("r", 3 * SIZE, sampler, 0.0, 0.0)
    found = hit()
    assert found.verify("r", 3 * SIZE, sampler, 0.0, 0.0)
    found.due("r", 3 * SIZE + 1, SIZE)
    found.match("r", SIZE, 1.0, pool_usable=True)
    order = found.plan_save("r", list(range(3 * SIZE + 1)), 3 * SIZE + 1, [[1, 2, 3, 4]], 9)
    assert order is None, "a preempted request computes on blocks that may come from elsewhere"
