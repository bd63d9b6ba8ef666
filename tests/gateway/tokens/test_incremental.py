"""Encoding only what is new gives exactly the tokens of encoding everything."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mooncache.gateway.tokens.cuts import alternatives
from mooncache.gateway.tokens.encoder import Encoder
from tests.gateway.tokens.tokenizers_of_all_kinds import KINDS, LLAMA3, corpus

_PIECE_CHARS = 8  # tiny, so that short texts have many cuts

_FRAGMENTS = st.sampled_from(
    [
        "<|im_start|>", "<|im_end|>", "<|im_end|>!", "<|mask|>", "<left>", "<s>", "</s>", "<|im_", "start|>", "<",
        " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2003", "\u200b", "a b", "ka to", "kato", "mon",
        "Ka to ri", "the and ing", " elsha x", "it's", "'S", "'ll ", "1234", " 12", "!?", "...", "▁", "▁a", "日本",
        "é",
        "e\u0301", "\u0301", "\u0300 a", "ﬁ", "Σ", "ß", "İ",
        "👩‍👩‍👧", "\U0001f1e9\U0001f1ea", "\u0000", "system\n", "x x x x x x",
    ]
)  # fmt: skip
_TEXTS = st.lists(
    st.one_of(_FRAGMENTS, _FRAGMENTS, st.text(max_size=4), st.text(alphabet="ab <|>\n1", max_size=12)),
    max_size=40,
).map("".join)


@cache
def _tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def _encoder(kind: str) -> Encoder:
    return Encoder(_tokenizer(kind), cache_bytes=1 << 20, piece_chars=_PIECE_CHARS)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(turns=st.lists(_TEXTS, min_size=1, max_size=4), special=st.booleans())
def test_a_growing_text_has_the_tokens_of_the_whole(kind: str, turns: list[str], special: bool) -> None:
    text = ""
    for turn in turns:
        text += turn
        expected = _tokenizer(kind).encode(text, add_special_tokens=special).ids
        assert _encoder(kind).encode(text, add_special_tokens=special).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_has_the_tokens_of_the_whole(kind: str) -> None:
    text = "<s>"
    for number, paragraph in enumerate(corpus(seed=7)[:20]):
        text += f"<|im_start|>{'user' if number % 2 else 'assistant'}\n{paragraph}<|im_end|>\n"
        expected = _tokenizer(kind).encode(text, add_special_tokens=False).ids
        assert _encoder(kind).encode(text, add_special_tokens=False).tolist() == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "with_whole_words"])
def test_a_later_turn_encodes_only_what_it_adds(kind: str) -> None:
    encoder = Encoder(_tokenizer(kind), cache_bytes=1 << 20, piece_chars=64)
    first = "".join(f"<|im_start|>{paragraph}<|im_end|>" for paragraph in corpus(seed=3)[:10])
    encoder.encode(first, add_special_tokens=False)
    added = "<|im_start|>one more<|im_end|>"
    plan = encoder.plan(first + added, add_special_tokens=False)
    longest = max(map(len, corpus(seed=3)))
    assert plan.new_chars <= len(added) + longest + 2 * 64
    assert plan.new_chars < len(first) / 4


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        "llama3",
        "qwen2",
        "o200k",
        "llama2",
        "metaspace_first",
        "metaspace_always",
        "wordpiece",
        "unigram",
    ],
)
def test_plain_text_is_cut_between_words(kind: str) -> None:
    encoder = Encoder(_tokenizer(kind), cache_bytes=1 << 20, piece_chars=64)
    text = "the kato and the ring " * 200
    encoder.encode(text, add_special_tokens=False)
    assert encoder.plan(text + "and so on", add_special_tokens=False).new_chars < 300


@pytest.mark.parametrize("kind", ["unknown_split", "with_greedy_tokens"])
def test_what_is_not_proven_is_not_cut(kind: str) -> None:
    encoder = Encoder(_tokenizer(kind), cache_bytes=1 << 20, piece_chars=64)
    text = "the kato and the ring " * 200
    encoder.encode(text, add_special_tokens=False)
    assert encoder.plan(text, add_special_tokens=False).new_chars == len(text)


def test_scopes_do_not_share() -> None:
    encoder = Encoder(_tokenizer("llama3"), cache_bytes=1 << 20, piece_chars=64)
    text = "the kato and the ring " * 200
    encoder.encode(text, add_special_tokens=False, scope="one")
    assert encoder.plan(text, add_special_tokens=False, scope="one").new_chars < 200
    assert encoder.plan(text, add_special_tokens=False, scope="two").new_chars == len(text)


def test_memory_is_bounded() -> None:
    encoder = Encoder(_tokenizer("llama3"), cache_bytes=20_000, piece_chars=64)
    for number in range(50):
        encoder.encode(f"{number} " + "the kato and the ring " * 50, add_special_tokens=False)
        assert 0 < encoder.memo.size_bytes <= 20_000


def test_text_that_is_no_unicode_is_refused() -> None:
    encoder = Encoder(_tokenizer("llama3"), cache_bytes=1 << 20, piece_chars=64)
    for text in ("\ud800", "the kato and the ring " * 50 + "\ud800" + " the ring and the kato" * 50):
        with pytest.raises(ValueError):
            encoder.encode(text, add_special_tokens=False)


def test_alternatives_of_a_pattern() -> None:
    assert alternatives(r"a|[|\]]b|(c|d)|\|e") == ["a", r"[|\]]b", "(c|d)", r"\|e"]
    assert len(alternatives(LLAMA3)) == 7
