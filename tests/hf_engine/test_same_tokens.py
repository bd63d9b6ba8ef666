"""The same prompt gives the same tokens: as transformers' own generate, in chunks, in a batch, after preemption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncache.hf_engine.kv_memory import KvMemory, StagedBlocks
from mooncache.kvcache.tensors import event_behind
from tests.hf_engine.conftest import BLOCK, Lab, prompt

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100, 257, 700)


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens of transformers' generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)

    def generate(tokens: list[int], count: int) -> list[int]:
        ids = torch.tensor([tokens])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        return out[0, len(tokens) :].tolist()

    return generate


@pytest.mark.parametrize("chunk_tokens", [16, 100, 4096])
def test_equal_to_generate_alone(
    make_lab: Callable[..., Lab], expected: Callable[[list[int], int], list[int]], chunk_tokens: int
) -> None:
    lab = make_lab(hf__prefill_chunk_tokens=chunk_tokens)
    for length in LENGTHS:
        assert lab.tokens(prompt(length)) == [expected(prompt(length), 12)], length
    lab.settled()


def test_equal_to_generate_in_a_batch(
    make_lab: Callable[..., Lab], expected: Callable[[list[int], int], list[int]]
) -> None:
    lab = make_lab(hf__prefill_chunk_tokens=64, hf__batch_max=16)
    prompts = [prompt(length, seed) for seed in (1, 2) for length in LENGTHS]
    assert lab.tokens(*prompts) == [expected(one, 12) for one in prompts]
    lab.settled()


def test_thirty_prompts_alone_and_together(lab: Lab) -> None:
    prompts = [prompt(20 + 7 * seed, seed) for seed in range(30)]
    alone = [lab.tokens(one, tokens=20)[0] for one in prompts]
    lab.forget()
    assert lab.tokens(*prompts, tokens=20) == alone
    assert len({tuple(tokens) for tokens in alone}) == 30, "random prompts have different answers"


def test_own_cache_is_used_and_changes_nothing(lab: Lab) -> None:
    one = prompt(200)
    first, second = lab.run(one)[0], lab.run(one)[0]
    assert first.cache.hit_tokens == 0 and first.cache.outcome == "off"
    assert second.cache.local_tokens == second.cache.hit_tokens == 200 // BLOCK * BLOCK == 192
    assert second.cache.outcome == "hit"
    assert first.tokens == second.tokens


def test_a_later_turn_reuses_prompt_and_answer(lab: Lab) -> None:
    turn = prompt(50)
    answer = lab.tokens(turn, tokens=60)[0]
    later = turn + answer + prompt(10, 9)
    reported = lab.run(later)[0].cache
    # The KV of the last token of the answer was never needed, so it is not there.
    assert reported.local_tokens == (50 + 60 - 1) // BLOCK * BLOCK


def test_a_whole_number_of_blocks_still_computes_one(lab: Lab) -> None:
    one = prompt(4 * BLOCK)
    first = lab.tokens(one)
    again = lab.run(one)[0]
    assert [again.tokens] == first
    assert again.cache.asked_tokens == 4 * BLOCK and again.cache.hit_tokens == 3 * BLOCK


def test_salts_keep_caches_apart(lab: Lab) -> None:
    one = prompt(100)
    lab.run(one, salt="a")
    assert lab.run(one, salt="b")[0].cache.hit_tokens == 0
    assert lab.run(one, salt="a")[0].cache.hit_tokens == 96


def test_too_few_blocks_preempt_and_change_nothing(make_lab: Callable[..., Lab], lab: Lab) -> None:
    prompts = [prompt(30 + seed, seed) for seed in range(8)]
    roomy = [lab.tokens(one, tokens=60)[0] for one in prompts]
    block_bytes = lab.parts.runner.memory.block_bytes
    small = make_lab(hf__kv_cache_bytes=max(1 << 20, 20 * block_bytes), hf__batch_max=8)
    # Hold blocks until 20 are left: eight sequences of six blocks each do not fit.
    held = small.on_engine(lambda: small.engine.blocks.allocate(small.engine.blocks.free_count - 20))
    assert small.tokens(*prompts, tokens=60) == roomy
    assert small.engine.scheduler.preemption_count > 0
    small.on_engine(lambda: small.engine.blocks.release(held))
    small.settled()


def test_sampling_follows_the_seed(lab: Lab) -> None:
    one = prompt(40)
    first = lab.tokens(one, temperature=1.0, seed=7)
    assert lab.tokens(one, temperature=1.0, seed=7) == first
    assert lab.tokens(one, temperature=1.0, seed=8) != first
    assert lab.tokens(one, temperature=1.0, seed=7, top_k=1) == lab.tokens(one)
    assert lab.tokens(one, temperature=1.0, seed=7, top_p=1e-6) == lab.tokens(one)


def test_stop_tokens_and_minimum(lab: Lab) -> None:
    one = prompt(40)
    plain = lab.tokens(one)[0]
    at = next(i for i in range(2, len(plain)) if plain[i] not in plain[:i])
    end = plain[at]
    stopped = lab.run(one, stop_ids=frozenset({end}))[0]
    assert stopped.tokens == plain[: at + 1]
    assert stopped.finish == "stop" and stopped.outputs[-1].stop_id == end
    longer = lab.run(one, stop_ids=frozenset({end}), min_tokens=at + 3)[0]
    assert end not in longer.tokens[: at + 3] and len(longer.tokens) >= at + 3


def test_staged_memory_moves_the_same_bytes() -> None:
    """The way of devices that are neither CPU nor CUDA: blocks pass through host memory."""
    made = {"blocks": 8, "layers": 2, "block_tokens": 4, "kv_heads": 1, "head_dim": 8}
    plain, other = (KvMemory(**made, dtype=torch.float32, device="cpu") for _ in range(2))
    staged = StagedBlocks(other.cells.view(8, -1).view(torch.uint8))
    assert (staged.block_count, staged.block_bytes) == (8, plain.block_bytes)
    plain.cells.copy_(torch.randn(plain.cells.shape))
    blocks = [5, 0, 3]
    with plain.movable.reading(blocks, plain.movable.fence(), 0.0) as values:
        data = [b"".join(value) for value in values]
    with staged.writing(blocks, staged.fence(), 0.0) as places:
        assert len(places) == 3
        for (place,), content in zip(places, data, strict=True):
            place[:] = content
    assert all(torch.equal(plain.cells[block], other.cells[block]) for block in blocks)
    with staged.reading(blocks, staged.fence(), 0.0) as values:
        assert [b"".join(value) for value in values] == data
    other.clear([5])
    assert not other.cells[5].any() and other.cells[0].any()


def test_a_step_that_fails_ends_its_sequences_only(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lab.tokens(prompt(40))[0]
    lab.forget()

    def explode(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(lab.parts.runner, "forward", explode)
        broken = lab.run(prompt(40), prompt(50))
    assert [one.finish for one in broken] == ["error", "error"] and "RuntimeError" in broken[0].outputs[
        -1
    ].message
    assert lab.tokens(prompt(40))[0] == expected
    lab.settled()


def test_copies_on_a_gpu_begin_behind_the_models_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in the middle of a prompt is not waited for by anybody, and its blocks are saved all the same."""
    did: list[Any] = []

    class Event:
        cuda_event = 0x77

        def record(self, stream: Any) -> None:
            did.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the model's on {device}")
    event, handle = event_behind(torch.device("cuda", 1))
    assert isinstance(event, Event) and handle == 0x77
    assert did == ["the model's on cuda:1"]
