r"""Where a text may be cut so that the tokens of the parts, one after the other, are the tokens of the whole.

Two kinds of cuts are proven (docs/decisions/0010-incremental-tokenisation.md has the arguments):

* before an added token such as <|im_start|>, which the tokenizer takes out of the text before anything else happens;
* between an ASCII letter and a space that an ASCII letter or digit follows, when each stage of the tokenizer is one of
  those known never to join the two.

A tokenizer with a stage that is not known here gets fewer cuts or none; its texts are then encoded whole. Where the
cuts fall depends only on the text before them and shortly after, so a text that grows keeps its old cuts.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_META = "\u2581"

# Parts of the alternations that tokenizers split text with. None of them can match a letter followed by a space, none
# looks behind, and the only one that looks ahead does so from white space.
_LETTERS_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LETTERS_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_KNOWN_ALTERNATIVES = frozenset(
    [
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        _CONTRACTION,
        r"\p{L}+",
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r"\p{N}+",
        r" ?\p{N}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{first}{_LETTERS_LOWER}{second}{end}"
            for first, second in ((rf"{_LETTERS_UPPER}*", "+"), (rf"{_LETTERS_UPPER}+", "*"))
            for end in ("", rf"{_CONTRACTION}?")
        ),
    ]
)
# They must be there too: without them a gap between two matches could hold a letter and a space.
_WORD_ALTERNATIVES = re.compile(r"\\p\{L(l|u|)\}")
_SPACE_ALTERNATIVE = r"\s+"
# Patterns of digits and of scripts without spaces: they leave "letter, space" in a gap for the next stage to split.
_HARMLESS_PATTERNS = frozenset(
    [r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", "[0-9]", "[一-龥\u3040-\u309f\u30a0-\u30ff]+"]
)
_CHARACTER_NORMALIZERS = frozenset(
    ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"]
)
_SPLITS_WORDS = frozenset(["Whitespace", "WhitespaceSplit", "BertPreTokenizer"])


def model_is_known(model: dict[str, object]) -> bool:
    """Whether the model encodes each text apart from the texts around it."""
    kind = str(model.get("type"))
    return kind in ("WordPiece", "WordLevel", "Unigram") or (kind == "BPE" and not model.get("dropout"))


def words_are_apart(tokenizer: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Whether no stage joins a letter with a space that a letter or digit follows."""
    if any(token["rstrip"] or _may_hold_space(token["content"]) for token in added):
        return False
    normalizer = tokenizer.get("normalizer")
    stages = _stages(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not stages:
        # a prepended mark replaces the space that a part begins with; before an added token there would be no mark
        marked = prepends_mark(normalizer) and not any(token["content"][:1].isalnum() for token in added)
        return _merges_keep_words(tokenizer["model"]) and (marked or _marks_spaces(normalizer))
    if not all(stage["type"] in _CHARACTER_NORMALIZERS for stage in _stages(normalizer, "normalizers")):
        return False
    for at, stage in enumerate(stages):
        if _splits_words(stage):
            return all(_works_on_words(later) for later in stages[at + 1 :])
        if not _is_harmless(stage):
            return False
    return False


def _may_hold_space(content: str) -> bool:
    forms = content + unicodedata.normalize("NFKC", content) + unicodedata.normalize("NFKD", content)
    return any(char.isspace() or char == _META for char in forms)


def _stages(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    if component.get("type") != "Sequence":
        return [component]
    return [inner for stage in component[name] for inner in _stages(stage, name)]


def _splits_words(stage: dict[str, Any]) -> bool:
    kind = stage["type"]
    if kind == "ByteLevel":
        return bool(stage.get("use_regex", True))
    if kind == "Metaspace":
        return stage.get("replacement") == _META and bool(stage.get("split", True))
    if kind == "Split":
        kept = (stage.get("behavior"), bool(stage.get("invert"))) in (("Isolated", False), ("Removed", True))
        return kept and _is_known_alternation((stage.get("pattern") or {}).get("Regex") or "")
    return kind in _SPLITS_WORDS


def _is_known_alternation(pattern: str) -> bool:
    parts = alternatives(pattern)
    words = any(_WORD_ALTERNATIVES.search(part) for part in parts)
    return words and _SPACE_ALTERNATIVE in parts and all(part in _KNOWN_ALTERNATIVES for part in parts)


def alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern at its top level."""
    parts, depth, in_class, start, at = [], 0, False, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*parts, pattern[start:]]


def _is_harmless(stage: dict[str, Any]) -> bool:
    if stage["type"] == "Split":
        pattern = (stage.get("pattern") or {}).get("Regex") or ""
        return (
            stage.get("behavior") == "Isolated" and not stage.get("invert") and pattern in _HARMLESS_PATTERNS
        )
    return str(stage["type"]) == "Digits"


def _works_on_words(stage: dict[str, object]) -> bool:
    """A stage that looks at one split at a time."""
    return str(stage["type"]) in ("ByteLevel", "Digits", "Punctuation", "Split", *_SPLITS_WORDS) or (
        stage["type"] == "Metaspace" and stage.get("replacement") == _META
    )


def _marks_spaces(normalizer: dict[str, object] | None) -> bool:
    """Spaces become marks and nothing else happens."""
    stages = _stages(normalizer, "normalizers")
    return bool(stages) and _is_mark(stages[-1]) and all(
        stage["type"] in _CHARACTER_NORMALIZERS for stage in stages[:-1]
    )  # fmt: skip


def prepends_mark(normalizer: dict[str, object] | None) -> bool:
    """A mark is put before the text, then spaces become marks: how Llama 2 reads text."""
    stages = _stages(normalizer, "normalizers")
    return (
        len(stages) == 2
        and stages[0] == {"type": "Prepend", "prepend": _META}
        and _is_mark(stages[1])
    )  # fmt: skip


def _is_mark(stage: dict[str, object]) -> bool:
    return stage == {"type": "Replace", "pattern": {"String": " "}, "content": _META}


def _merges_keep_words(model: dict[str, Any]) -> bool:
    """No token has a mark behind another character, so no merge joins the end of a word with the space behind it."""
    if model.get("type") != "BPE" or model.get("ignore_merges") or _META not in model["vocab"]:
        return False
    if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return False
    return not any(_META in token.lstrip(_META) for token in model["vocab"])
