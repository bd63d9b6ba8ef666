"""Small tokenizers of every kind that models use, trained on the spot."""

from __future__ import annotations

import random
from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


def corpus(seed: int = 1) -> list[str]:
    """Sentences of made-up words with punctuation, digits, accents and newlines."""
    dice = random.Random(seed)
    syllables = ["ka", "to", "ri", "mon", "el", "sha", "ße", "né", "the", "and", "ing", "日本", "ő", "x"]
    words = ["".join(dice.choices(syllables, k=dice.randint(1, 4))) for _ in range(400)]
    marks = [" ", " ", " ", ", ", ". ", "\n", "\n\n", "  ", "'s ", " 12 ", "!? ", "\t"]
    return ["".join(dice.choice(words) + dice.choice(marks) for _ in range(60)) for _ in range(60)]


def _bpe(**settings: object) -> Tokenizer:
    return Tokenizer(models.BPE(**settings))


def _train(tokenizer: Tokenizer, **settings: object) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(SPECIALS), show_progress=False, **settings
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    """Byte-level BPE with the GPT-2 split."""
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return _train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def gpt2_prefix_space() -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _split(pattern: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = _bpe(ignore_merges=True)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = _train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def llama3() -> Tokenizer:
    return _split(LLAMA3)


def qwen2() -> Tokenizer:
    return _split(LLAMA3.replace("{1,3}", ""), normalizers.NFC())


def o200k() -> Tokenizer:
    return _split(O200K)


def unknown_split() -> Tokenizer:
    """A pattern that nothing is known about: it joins words in pairs."""
    return _split(r"\p{L}+ \p{L}+|.|\s")


def llama2() -> Tokenizer:
    """A mark before the text and for every space, no split into words, bytes for what is unknown."""
    tokenizer = _bpe(unk_token="<unk>", fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIALS], show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    import json

    description = json.loads(tokenizer.to_str())
    description["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = _bpe(unk_token="<unk>", fuse_unk=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def metaspace_first() -> Tokenizer:
    return _metaspace("first")


def metaspace_always() -> Tokenizer:
    return _metaspace("always")


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]", *SPECIALS], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", *SPECIALS], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def with_greedy_tokens() -> Tokenizer:
    """Added tokens that eat white space, contain each other, hold spaces, or are found after normalising."""
    tokenizer = qwen2()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|mask|>", lstrip=True, rstrip=True, special=True),
            AddedToken("<|im_end|>!", special=True),
            AddedToken("<left>", lstrip=True, normalized=False),
        ]
    )
    tokenizer.add_tokens([AddedToken("ka to", normalized=True), AddedToken("mon", rstrip=True)])
    return tokenizer


def with_left_token() -> Tokenizer:
    """As above, but only with what word cuts are allowed beside."""
    tokenizer = llama3()
    tokenizer.add_tokens(
        [AddedToken("<left>", lstrip=True, normalized=False), AddedToken("kato", normalized=True)]
    )
    return tokenizer


def with_whole_words() -> Tokenizer:
    """Tokens that are only found as whole words: nothing may be cut."""
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("kato", single_word=True)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker
    for maker in (
        gpt2, gpt2_prefix_space, llama3, qwen2, o200k, unknown_split, llama2, metaspace_first, metaspace_always,
        wordpiece, unigram, with_greedy_tokens, with_left_token, with_whole_words,
    )
}  # fmt: skip
