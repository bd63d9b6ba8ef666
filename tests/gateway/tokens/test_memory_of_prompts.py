"""What is remembered of a prompt changes neither its cuts nor its keys."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.gateway.tokens.chains import ChainMemo
from mooncache.gateway.tokens.encoder import Encoder
from mooncache.gateway.tokens.memo import ENTRY_BYTES, Memo
from mooncache.kvcache.keys import content_passport, request_keys, salted
from mooncache.kvcache.passport import Passport
from tests.gateway.tokens.tokenizers_of_all_kinds import KINDS, corpus

_PIECE_CHARS = 8
_STRETCH_CHARS = 16 * _PIECE_CHARS
_PASSPORT = Passport(
    weights_digest="w",
    config_digest="c",
    tokenizer_digest="t",
    engine="e",
    kv_dtype="float32",
    kv_layout="l",
    block_tokens=4,
)
_TOKENS = st.lists(st.integers(0, 9), max_size=60)
_ENDINGS = ("", "x", " x", "<|im_end|>", "<|im_start|>!", " the ring" * 40, "<|im_", "\n", "日本" * 80)


def _text(seed: int) -> str:
    dice = random.Random(seed)
    parts = [
        dice.choice(("<|im_start|>", "<|im_end|>", " ", "\n", "x" * 30, *corpus(seed)[:9])) for _ in range(12)
    ]
    return "".join(parts)


@pytest.mark.parametrize("kind", ["llama3", "llama2", "qwen2", "unigram", "unknown_split", "wordpiece"])
def test_what_follows_a_window_does_not_move_the_cuts_within(kind: str) -> None:
    encoder = Encoder(KINDS[kind](), cache_bytes=1 << 20, piece_chars=_PIECE_CHARS)
    for seed in range(2):
        text = _text(seed)
        for cut in range(_STRETCH_CHARS, min(len(text), 5 * _STRETCH_CHARS), 83):
            for ending in _ENDINGS:
                changed = text[:cut] + ending
                expected = encoder._tokenizer.encode(changed, add_special_tokens=False).ids
                assert encoder.encode(changed, add_special_tokens=False).tolist() == expected


def test_a_later_turn_is_cut_only_behind_what_is_known() -> None:
    encoder = Encoder(KINDS["llama3"](), cache_bytes=1 << 20, piece_chars=64)
    text = "the kato and the ring " * 500
    encoder.encode(text, add_special_tokens=False)
    plan = encoder.plan(text + "and so on", add_special_tokens=False)
    assert len(plan.parts) <= 2 * 16 + 1
    assert len(plan.text) - sum(map(len, plan.parts)) > len(text) * 3 / 4
    assert encoder.finish(plan).tolist() == encoder._tokenizer.encode(plan.text, add_special_tokens=False).ids


def test_stretches_of_one_scope_are_not_found_in_another() -> None:
    encoder = Encoder(KINDS["llama3"](), cache_bytes=1 << 20, piece_chars=64)
    text = "the kato and the ring " * 500
    encoder.encode(text, add_special_tokens=False, scope="one")
    assert encoder.plan(text, add_special_tokens=False, scope="one").head
    assert not encoder.plan(text, add_special_tokens=False, scope="two").head


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(_TOKENS, min_size=1, max_size=6),
    grows=st.booleans(),
    bytes_max=st.sampled_from([0, 1500, 1 << 20]),
)
def test_remembered_keys_are_those_of_the_whole(
    prompts: list[list[int]], grows: bool, bytes_max: int
) -> None:
    memo, content = ChainMemo(bytes_max, step_tokens=10), content_passport(_PASSPORT.block_tokens)
    tokens = array("I")
    for prompt in prompts:
        tokens = tokens + array("I", prompt) if grows else array("I", prompt)
        for salt in ("", "one"):
            found = memo.chain_keys(salted(_PASSPORT, salt), content, tokens, scope=salt)
            assert found.keys == request_keys(_PASSPORT, tokens, salt=salt)
            assert found.content_keys == content.chain_keys(tokens)
        assert memo.memo.size_bytes <= bytes_max


def test_only_the_keys_of_new_steps_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    memo, content = ChainMemo(1 << 20, step_tokens=8), content_passport(_PASSPORT.block_tokens)
    made: list[int] = []
    real = Passport.chain_keys

    def counted(self: Passport, tokens: memoryview, parent: bytes | None = None) -> bytes:
        made.append(len(tokens))
        return real(self, tokens, parent)

    monkeypatch.setattr(Passport, "chain_keys", counted)
    for count in (40, 52):
        memo.chain_keys(_PASSPORT, content, array("I", range(count)), scope="s")
    memo.chain_keys(_PASSPORT, content, array("I", range(52)), scope="another")
    assert made == [40, 40, 12, 12, 52, 52]


def test_memory_of_values_is_bounded_and_the_oldest_goes_first() -> None:
    memo: Memo[bytes] = Memo(2 * (ENTRY_BYTES + 8), len)
    memo.keep([(b"a", bytes(8)), (b"b", bytes(8))])
    assert memo.find([b"a"]) == [bytes(8)]
    memo.keep([(b"c", bytes(8)), (b"too large", bytes(4096))])
    assert memo.find([b"a", b"b", b"c", b"too large"]) == [bytes(8), None, bytes(8), None]
    assert memo.size_bytes == 2 * (ENTRY_BYTES + 8)
