"""Several groups of KV and sliding windows under vLLM's own scheduler: what the model sees is right at every step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mooncache.errors import ChecksumMismatch
from tests.connectors.harness import BLOCK_TOKENS, Harness, Make, ask, expected, prompt
from tests.connectors.test_break_even import ON, teach
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

WINDOW = 3 * BLOCK_TOKENS
# Of gpt-oss, Gemma 3 and Mistral; a window that ends within a block, and one that a block does not fill.
LAYOUTS = [(WINDOW, 0), (WINDOW, WINDOW, 0), (WINDOW,), (0, WINDOW + 1, BLOCK_TOKENS + 5), (5,), (0, 0)]
# Windows, and of each group how many times BLOCK_TOKENS its blocks have. Gemma 4 has the first.
SIZED_LAYOUTS = [
    ((WINDOW, 0), (2, 1)),
    ((WINDOW, 0), (1, 2)),
    ((0, 0), (1, 4)),
    ((5, 0), (1, 4)),
    ((WINDOW, WINDOW + 1, 0), (4, 1, 2)),
]
LENGTH = 10 * BLOCK_TOKENS + 7


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
@pytest.mark.parametrize("step_tokens", [512, 70])
def test_a_fresh_engine_loads_what_is_seen_from_the_border(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], step_tokens: int
) -> None:
    tokens = prompt(len(windows) + step_tokens, LENGTH)
    first = make(windows=windows, max_tokens_step=step_tokens)
    first.add("r", tokens, max_tokens=70)
    first.run()
    assert first.leaked_blocks == 0
    # Also blocks that left the window while the request went on.
    assert len(faulty.blocks) == (LENGTH + 69) // BLOCK_TOKENS * len(windows)
    second = make(windows=windows)
    second.add("r", tokens, max_tokens=70, ask=ask())
    second.run()
    assert second.outputs["r"] == first.outputs["r"] == expected(tokens, 70)
    reported = second.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", 10 * BLOCK_TOKENS)
    assert second.counted["hit_tokens"] == 10 * BLOCK_TOKENS
    needed = sum(10 if not window else -(-(window - 1) // BLOCK_TOKENS) for window in windows)
    assert second.counted["loaded_blocks"] == len(faulty.given) == needed
    assert second.leaked_blocks == 0
    second.connector._scheduler._book.check()
    # The next turn goes on from blocks that were filled while decoding.
    longer = tokens + expected(tokens, 70) + prompt(5, 40)
    third = make(windows=windows)
    third.add("r", longer, ask=ask())
    third.run()
    assert third.outputs["r"] == expected(longer, 4)
    assert third.reported("r")["loaded_tokens"] == (LENGTH + 69) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("windows", [(WINDOW, 0), (WINDOW,)], ids=str)
def test_a_prompt_of_whole_blocks_keeps_its_last_block_to_compute(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...]
) -> None:
    tokens = prompt(31, 10 * BLOCK_TOKENS)
    for _ in range(2):
        engine = make(windows=windows)
        engine.add("r", tokens, ask=ask())
        engine.run()
        assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", 9 * BLOCK_TOKENS)


@pytest.mark.parametrize("windows", LAYOUTS[:4], ids=str)
@pytest.mark.parametrize("lost", [0, 5, 9])
def test_a_block_that_is_gone_ends_the_prefix_where_no_group_needs_it(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], lost: int
) -> None:
    tokens = prompt(32, LENGTH)
    first = make(windows=windows)
    first.add("r", tokens)
    first.run()
    windowed = next(group for group, window in enumerate(windows) if window)
    chain = key_chain(first, tokens)
    del faulty.blocks[chain.key(lost, group=windowed)]
    second = make(windows=windows)
    second.add("r", tokens, ask=ask())
    second.run()
    assert second.outputs["r"] == expected(tokens, 4)
    needs = -(-(windows[windowed] - 1) // BLOCK_TOKENS)
    assert second.reported("r")["loaded_tokens"] == (10 if lost < 10 - needs else lost) * BLOCK_TOKENS
    # It is computed again, and then saved again, unless it left the window before the request began.
    assert (chain.key(lost, group=windowed) in faulty.blocks) is (lost >= 10 - needs)


def key_chain(engine: Any, tokens: list[int]) -> Any:
    from mooncache.connectors.vllm.core.chain import KeyChain

    passports = engine.connector._scheduler._book._passports
    return KeyChain.begin(passports, tokens, groups=len(engine.connector._scheduler._groups))


@pytest.mark.parametrize("windows", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("group", [0, -1])
def test_a_load_that_fails_anywhere_is_computed_as_a_whole(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], group: int
) -> None:
    tokens = prompt(33, LENGTH)
    first = make(windows=windows)
    first.add("r", tokens)
    first.run()
    key = key_chain(first, tokens).key(8, group=group % len(windows))
    faulty.codes[key] = ChecksumMismatch.code
    second = make(windows=windows)
    second.add("r", tokens, ask=ask())
    second.run()
    assert second.outputs["r"] == expected(tokens, 4)
    reported = second.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("failed", 0)
    assert reported["failed_blocks"] > 0
    assert "hit_tokens" not in second.counted
    assert second.leaked_blocks == 0


@pytest.mark.parametrize("windows", LAYOUTS[:3], ids=str)
def test_a_load_that_stalls_is_cut_and_all_of_it_computed(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...]
) -> None:
    tokens = prompt(36, LENGTH)
    first = make(windows=windows)
    first.add("r", tokens)
    first.run()
    second = make(ON, windows=windows)
    teach(second, monkeypatch, block_s=0.1, load_s=0.001)
    faulty.stalls_after = 2
    second.add("r", tokens, ask=ask())
    second.run()
    assert second.outputs["r"] == expected(tokens, 4)
    reported = second.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"], reported["failed_blocks"]) == ("load_cut", 0, 0)
    assert second.counted["break_even_tokens:load_cut"] == 10 * BLOCK_TOKENS


@pytest.mark.parametrize("windows", LAYOUTS[:3], ids=str)
def test_a_decode_leg_awaits_what_its_border_needs(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...]
) -> None:
    tokens = prompt(34, LENGTH)
    decode, prefill = make(windows=windows), make(windows=windows, max_tokens_step=100)
    # The prefill engine has the beginning itself, but what lies before its window neither there nor in the pool.
    prefill.add("before", tokens[: 6 * BLOCK_TOKENS + 1])
    prefill.run()
    for group, window in enumerate(windows):
        for block in range(2) if window else ():
            del faulty.blocks[key_chain(prefill, tokens).key(block, group=group)]
    decode.add("d", tokens, ask=ask("decode", wait_tokens=LENGTH, wait_ms=60_000))
    for _ in range(5):
        decode.step()
    assert decode.status("d") == "WAITING"
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill"))
    prefill.run()
    decode.run()
    assert decode.outputs["d"] == expected(tokens, 4)
    assert decode.reported("d")["outcome"] == "hit"
    assert decode.reported("d")["loaded_tokens"] == 10 * BLOCK_TOKENS


def test_preempted_requests_come_back_by_what_the_pool_has(make: Make, faulty: FaultyPool) -> None:
    prompts = {name: prompt(40 + number, 3 * BLOCK_TOKENS + 5) for number, name in enumerate("abc")}
    engine = make(windows=(WINDOW, 0), blocks=24)
    requests = [engine.add(name, tokens, max_tokens=90) for name, tokens in prompts.items()]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for name, tokens in prompts.items():
        assert engine.outputs[name] == expected(tokens, 90)
    assert engine.leaked_blocks == 0
    engine.connector._scheduler._book.check()


def test_engines_with_other_windows_or_groups_never_share(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(35, LENGTH)
    seen: set[bytes] = set()
    for windows in [(0,), *LAYOUTS, (2 * WINDOW, 0), (0, WINDOW)]:
        engine = make(windows=windows)
        engine.add("r", tokens, ask=ask())
        engine.run()
        assert engine.outputs["r"] == expected(tokens, 4)
        assert engine.reported("r")["loaded_tokens"] == 0
        assert len(faulty.blocks) == len(seen) + 10 * len(windows)
        seen = set(faulty.blocks)


# --- blocks of different sizes -----------------------------------------------------------------------------------


def needed_blocks(engine: Harness, first: int, border: int) -> int:
    """How many blocks of vLLM the token behind `border` looks at, behind those of a border before it."""
    return sum(
        border // size - max(first, border - window + 1 if window else 0) // size
        for window, size in zip(engine.windows, engine.sizes, strict=True)
    )


@pytest.mark.parametrize(("windows", "sizes"), SIZED_LAYOUTS, ids=str)
@pytest.mark.parametrize("step_tokens", [512, 70])
def test_groups_with_blocks_of_different_sizes_meet_at_their_common_borders(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], sizes: tuple[int, ...], step_tokens: int
) -> None:
    tokens = prompt(sum(sizes) + step_tokens, LENGTH)
    first = make(windows=windows, sizes=sizes, max_tokens_step=step_tokens)
    first.add("r", tokens, max_tokens=70)
    first.run()
    assert first.leaked_blocks == 0
    apart = math.lcm(*first.sizes)
    border = LENGTH // apart * apart
    second = make(windows=windows, sizes=sizes)
    second.add("r", tokens, max_tokens=70, ask=ask())
    second.run()
    assert second.outputs["r"] == first.outputs["r"] == expected(tokens, 70)
    reported = second.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", border)
    assert second.counted["loaded_blocks"] == len(faulty.given) == needed_blocks(second, 0, border)
    assert second.leaked_blocks == 0
    second.connector._scheduler._book.check()
    # The next turn goes on from blocks that were filled while decoding.
    longer = tokens + expected(tokens, 70) + prompt(5, 40)
    third = make(windows=windows, sizes=sizes)
    third.add("r", longer, ask=ask())
    third.run()
    assert third.outputs["r"] == expected(longer, 4)
    assert third.reported("r")["loaded_tokens"] == (LENGTH + 69) // apart * apart
    # Engines whose blocks are otherwise do not find any of them.
    faulty.given.clear()
    for other in (sizes[::-1], (1,) * len(sizes)):
        engine = make(windows=windows, sizes=other)
        engine.add("r", tokens, ask=ask())
        engine.run()
        assert engine.outputs["r"] == expected(tokens, 4)
        assert (engine.reported("r")["loaded_tokens"], len(faulty.given)) == (0, 0)


@pytest.mark.parametrize(("windows", "sizes"), SIZED_LAYOUTS, ids=str)
def test_what_the_engine_has_itself_up_to_a_common_border_is_not_loaded(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    tokens = prompt(81, LENGTH)
    first = make(windows=windows, sizes=sizes)
    first.add("r", tokens)
    first.run()
    second = make(windows=windows, sizes=sizes)
    apart = math.lcm(*second.sizes)
    border = LENGTH // apart * apart
    second.add("begin", tokens[: apart + 1])
    second.run()
    faulty.given.clear()
    second.add("r", tokens, ask=ask())
    second.run()
    assert second.outputs["r"] == expected(tokens, 4)
    assert second.reported("r")["loaded_tokens"] == border - apart
    assert len(faulty.given) == needed_blocks(second, apart, border)


@pytest.mark.parametrize(("windows", "sizes"), SIZED_LAYOUTS, ids=str)
def test_one_of_the_blocks_between_two_borders_that_is_gone_or_damaged_takes_the_border(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    tokens = prompt(82, LENGTH)
    first = make(windows=windows, sizes=sizes)
    first.add("r", tokens)
    first.run()
    apart = math.lcm(*first.sizes)
    border = LENGTH // apart * apart
    chain = key_chain(first, tokens)
    groups, count = first.connector._scheduler._groups, border // apart
    for group in range(len(groups)):
        is_seen = groups.first_needed(group, count) < count
        key = chain.key(count - 1, group=group)
        faulty.codes[key] = ChecksumMismatch.code
        damaged = loads(make(windows=windows, sizes=sizes), tokens)
        assert damaged == (("failed", 0) if is_seen else ("hit", border))
        del faulty.codes[key]
        kept = faulty.blocks.pop(key)
        gone = loads(make(windows=windows, sizes=sizes), tokens)
        assert gone == (("partial", border - apart) if is_seen else ("hit", border))
        assert faulty.blocks.setdefault(key, kept) == kept, (
            "it is computed and saved again, with the same bytes"
        )


def loads(engine: Harness, tokens: list[int]) -> tuple[str, int]:
    """How the prompt's blocks came, and how many tokens; the answer is right in any case."""
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.leaked_blocks == 0
    reported = engine.reported("r")
    return reported["outcome"], reported["loaded_tokens"]


@pytest.mark.parametrize(("windows", "sizes"), SIZED_LAYOUTS, ids=str)
def test_a_decode_leg_awaits_the_last_common_border(
    make: Make, faulty: FaultyPool, windows: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    tokens = prompt(83, LENGTH)
    decode, prefill = (make(windows=windows, sizes=sizes, max_tokens_step=100) for _ in range(2))
    decode.add("d", tokens, ask=ask("decode", wait_tokens=LENGTH, wait_ms=60_000))
    for _ in range(5):
        decode.step()
    assert decode.status("d") == "WAITING"
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill"))
    prefill.run()
    decode.run()
    assert decode.outputs["d"] == expected(tokens, 4)
    apart = math.lcm(*decode.sizes)
    reported = decode.reported("d")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", LENGTH // apart * apart)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_preempted_requests_come_back_at_common_borders(
    make: Make, faulty: FaultyPool, sizes: tuple[int, ...]
) -> None:
    prompts = {name: prompt(90 + number, 3 * BLOCK_TOKENS + 5) for number, name in enumerate("abc")}
    engine = make(windows=(WINDOW, 0), sizes=sizes, blocks=14)
    requests = [engine.add(name, tokens, max_tokens=90) for name, tokens in prompts.items()]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for name, tokens in prompts.items():
        assert engine.outputs[name] == expected(tokens, 90)
    assert engine.leaked_blocks == 0
    engine.connector._scheduler._book.check()
