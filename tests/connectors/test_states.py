"""Recurrent states under vLLM's own scheduler: they are shared where a step ended at a border, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from mooncache.connectors.vllm.core.layer_hooks import why_whole_blocks
from mooncache.errors import ChecksumMismatch
from tests.connectors.harness import BLOCK_TOKENS, STATE, Make, ask, expected, prompt
from tests.connectors.test_grouped_engine import LENGTH, WINDOW, key_chain
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# Of LFM2 and Qwen3-Next, a model that has windows as well, and one of states alone.
LAYOUTS = [(STATE, 0), (0, STATE, STATE, STATE), (WINDOW, STATE, 0), (STATE,)]


def states_of(engine: Any, tokens: list[int], pool: FaultyPool) -> list[int]:
    """The borders at which the pool has a state of each group that has one."""
    chain = key_chain(engine, tokens)
    groups = [group for group, window in enumerate(engine.windows) if window == STATE]
    return [
        block + 1
        for block in range(len(chain))
        if all(chain.key(block, group=group) in pool.blocks for group in groups)
    ]


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
@pytest.mark.parametrize(("step_tokens", "borders"), [(512, [10]), (70, [2, 4, 6, 8, 10])])
def test_a_fresh_engine_goes_on_from_the_state_at_the_last_border(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], step_tokens: int, borders: list[int]
) -> None:
    tokens = prompt(len(windows) + step_tokens, LENGTH)
    first = make(windows=windows, max_tokens_step=step_tokens)
    first.add("r", tokens, max_tokens=70)
    first.run()
    assert first.outputs["r"] == expected(tokens, 70)
    whole = tokens + expected(tokens, 70)
    # Behind the prompt there is a step for each token, and so a state at each border.
    assert states_of(first, whole, faulty) == [*borders, 11, 12]
    assert first.leaked_blocks == 0
    second = make(windows=windows)
    second.add("r", tokens, max_tokens=70, ask=ask())
    second.run()
    assert second.outputs["r"] == first.outputs["r"]
    reported = second.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", 10 * BLOCK_TOKENS)
    needed = {0: 10, WINDOW: 3, STATE: 1}
    assert second.counted["loaded_blocks"] == sum(needed[window] for window in windows)
    assert second.leaked_blocks == 0
    second.connector._scheduler._book.check()
    # The next turn goes on from a state that was kept while decoding.
    third = make(windows=windows)
    third.add("r", whole + prompt(5, 40), ask=ask())
    third.run()
    assert third.outputs["r"] == expected(whole + prompt(5, 40), 4)
    assert third.reported("r")["loaded_tokens"] == 12 * BLOCK_TOKENS


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_common_prefix_ends_at_the_last_border_with_a_state(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...]
) -> None:
    tokens = prompt(71, LENGTH)
    first = make(windows=windows, max_tokens_step=4 * BLOCK_TOKENS)
    first.add("r", tokens)
    first.run()
    assert states_of(first, tokens, faulty) == [4, 8, 10]
    second = make(windows=windows)
    other = tokens[: 7 * BLOCK_TOKENS + 3] + prompt(72, 100)
    second.add("r", other, ask=ask())
    second.run()
    assert second.outputs["r"] == expected(other, 4)
    assert second.reported("r")["loaded_tokens"] == 4 * BLOCK_TOKENS


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_state_that_is_gone_is_made_again_and_saved(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...]
) -> None:
    tokens = prompt(73, LENGTH)
    first = make(windows=windows)
    first.add("r", tokens)
    first.run()
    group = windows.index(STATE)
    lost = key_chain(first, tokens).key(9, group=group)
    del faulty.blocks[lost]
    second = make(windows=windows)
    for name in ("computed", "own"):
        second.add(
            name, tokens, ask=ask("prefill")
        )  # others wait for it: what was saved before is offered again
        second.run()
        assert second.outputs[name] == expected(tokens, 4)
        assert second.reported(name)["loaded_tokens"] == 0
        assert faulty.blocks.pop(lost, None) is not None, "also what the engine's own cache had"


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_state_that_does_not_come_is_computed_with_all_before_it(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...]
) -> None:
    tokens = prompt(74, LENGTH)
    first = make(windows=windows)
    first.add("r", tokens)
    first.run()
    faulty.codes[key_chain(first, tokens).key(9, group=windows.index(STATE))] = ChecksumMismatch.code
    second = make(windows=windows)
    second.add("r", tokens, ask=ask())
    second.run()
    assert second.outputs["r"] == expected(tokens, 4)
    reported = second.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("failed", 0)
    assert second.leaked_blocks == 0


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_decode_leg_awaits_the_state_behind_its_prompt_and_no_other(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...]
) -> None:
    tokens = prompt(75, LENGTH)
    decode, prefill = make(windows=windows), make(windows=windows)
    decode.add("d", tokens, ask=ask("decode", wait_tokens=LENGTH, wait_ms=60_000))
    # Nobody said that there will be a state behind six blocks.
    decode.add("early", prompt(76, LENGTH), ask=ask("decode", wait_tokens=6 * BLOCK_TOKENS, wait_ms=60_000))
    decode.run_until(lambda: "early" in decode.finished)
    assert decode.status("d") == "WAITING"
    assert decode.reported("early")["waited_ms"] < 30_000
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill"))
    prefill.run()
    decode.run()
    assert decode.outputs["d"] == expected(tokens, 4)
    assert decode.reported("d")["outcome"] == "hit"
    assert decode.reported("d")["loaded_tokens"] == 10 * BLOCK_TOKENS


def test_preempted_requests_go_on_from_their_states(make: Make, faulty: FaultyPool) -> None:
    prompts = {name: prompt(80 + number, 3 * BLOCK_TOKENS + 5) for number, name in enumerate("abc")}
    engine = make(windows=(0, STATE), blocks=20)
    requests = [engine.add(name, tokens, max_tokens=90) for name, tokens in prompts.items()]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for name, tokens in prompts.items():
        assert engine.outputs[name] == expected(tokens, 90)
    assert engine.leaked_blocks == 0
    engine.connector._scheduler._book.check()


def test_states_of_other_kinds_and_windows_never_share(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(77, LENGTH)
    roots: set[bytes] = set()
    for windows in [*LAYOUTS, (0, STATE), (2, 0), (2,), (0,)]:
        engine = make(windows=windows)
        engine.add("r", tokens, ask=ask())
        engine.run()
        assert engine.reported("r")["loaded_tokens"] == 0
        roots |= {passport.root() for passport in engine.connector._scheduler._book._passports}
    assert len(roots) == sum(map(len, LAYOUTS)) + 6


def test_states_are_saved_behind_their_step() -> None:
    assert "no hook of a layer" in why_whole_blocks(wanted=True, full_graphs=False, states=True)
