"""Text to token ids; of a text that grows, only what is new is encoded.

A long text is cut where the tokens of the parts are provably the tokens of the whole (cuts.py). Parts that are
complete, that is followed by another part, are remembered. The last part changes when the text grows and is not.

To look for the cuts of a long text costs about as much as to encode a few of its parts. So stretches of many parts are
remembered as well, each under a window of text that says where its cuts fall: where a cut falls depends on the text
from the cut before it to at most `Cutter.ahead_chars` behind it. A later turn walks over the stretches that it knows,
and is cut behind them.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from mooncache.gateway.tokens.cuts import model_is_known, prepends_mark, words_are_apart
from mooncache.gateway.tokens.memo import Memo, Namer

# One thread encodes unless the environment says otherwise; the library's own would compete with the event loop, and
# handing a short text to one costs more than encoding it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_PROBES = ("a", "word and Word 12")
_WORD_END = re.compile(r"[A-Za-z](?= [A-Za-z0-9])")
_STRETCH_PIECES = 16


class PartTokens(NamedTuple):
    """Tokens of a part, or of a stretch of parts: its length, and whether it ends between two words."""

    tokens: array[int]
    chars: int
    before_word: bool


class Stretch(NamedTuple):
    """A stretch that is not remembered yet: the parts from `first` to before `last`."""

    name: bytes
    first: int
    last: int
    chars: int
    before_word: bool


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """A text on its way: stretches that are known, then parts that are known or have to be encoded."""

    text: str
    special: bool
    parts: list[str]
    names: list[bytes]
    found: list[array[int] | None]
    new_chars: int
    head: list[array[int]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)


class Encoder:
    """One tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = 0, piece_chars: int = 1024) -> None:
        self._tokenizer = tokenizer
        self._ends = _ends(tokenizer)
        self.memo: Memo[PartTokens] = Memo(cache_bytes, _size)
        self._stretch_chars = _STRETCH_PIECES * piece_chars
        self._cutter: Cutter | None = None
        if cache_bytes:
            description = json.loads(tokenizer.to_str())
            splits = bool(tokenizer.encode_special_tokens)
            cutter = Cutter(description, target_chars=piece_chars, splits_specials=splits)
            self._cutter = cutter if cutter.possible else None

    def encode(self, text: str, *, add_special_tokens: bool, scope: str = "") -> array[int]:
        """Ids of the tokens of a text. Raises ValueError for text that is not Unicode (lone surrogates).

        scope: whose remembered parts may be used; so that the time does not reveal what others have asked.
        """
        return self.finish(self.plan(text, add_special_tokens=add_special_tokens, scope=scope))

    def plan(self, text: str, *, add_special_tokens: bool, scope: str = "") -> EncodingPlan:
        """Find the known prefix of a text, in less than 1 ms for 200 thousand characters. Raises as `encode`."""
        cutter = self._cutter
        if not cutter or (add_special_tokens and not self._ends):
            return EncodingPlan(text, add_special_tokens, [text], [], [None], len(text))
        scoped = self.memo.namer(scope)
        head, start, is_word = self._known_head(text, scoped)
        cuts = cutter.cuts(text, start)
        stretches = self._new_stretches(text, scoped, (start, is_word), cuts)
        parts, names = [], []
        for at, next_is_word in [*cuts, (len(text), False)]:
            part = text[start + 1 : at] if is_word and cutter.drops_space else text[start:at]
            parts.append(part)
            start, is_word = at, next_is_word
        for part in parts[:-1]:
            name = scoped.copy()
            name.update(part.encode())
            names.append(name.digest())
        pieces = self.memo.find(names)
        found = [*(piece.tokens if piece is not None else None for piece in pieces), None]
        new_chars = sum(len(part) for part, tokens in zip(parts, found, strict=True) if tokens is None)
        return EncodingPlan(text, add_special_tokens, parts, names, found, new_chars, head, stretches)

    def finish(self, plan: EncodingPlan) -> array[int]:
        """Encodes what is missing. Raises as `encode`."""
        if len(plan.parts) == 1 and not plan.head:
            return self._encode([plan.text], plan.special)[0]
        missing = [at for at, tokens in enumerate(plan.found) if tokens is None]
        found = list(plan.found)
        for at, tokens in zip(missing, self._encode([plan.parts[at] for at in missing], False), strict=True):
            found[at] = tokens
        known = [tokens for tokens in found if tokens is not None]
        self.memo.keep(
            [(plan.names[at], PartTokens(known[at], 0, False)) for at in missing if at < len(plan.names)]
        )
        self.memo.keep(
            [
                (name, PartTokens(_joined(known[first:last]), chars, before_word))
                for name, first, last, chars, before_word in plan.stretches
            ]
        )
        before, after = self._ends or ([], [])
        ends = (array("I", before), array("I", after)) if plan.special else (array("I"), array("I"))
        return _joined([ends[0], *plan.head, *known, ends[1]])

    def _known_head(self, text: str, scoped: Namer) -> tuple[list[array[int]], int, bool]:
        """Tokens of the stretches at the beginning that are known, and the cut at which they end."""
        head, at, is_word = [], 0, False
        while at + self._stretch_chars <= len(text):
            (piece,) = self.memo.find([self._stretch_name(text, scoped, at, is_word)])
            if piece is None:
                break
            head.append(piece.tokens)
            at, is_word = at + piece.chars, piece.before_word
        return head, at, is_word

    def _new_stretches(
        self, text: str, scoped: Namer, start: tuple[int, bool], cuts: list[tuple[int, bool]]
    ) -> list[Stretch]:
        """Stretches from `start` on whose cuts fall where they do whatever follows the window that names them."""
        found, first, (at, is_word) = [], 0, start
        ahead = self._cutter.ahead_chars if self._cutter else 0
        while at + self._stretch_chars <= len(text):
            last = bisect_right(cuts, at + self._stretch_chars - ahead, key=lambda cut: cut[0])
            if last == first:
                break  # a part without cuts: no walk will come past it
            end, before_word = cuts[last - 1]
            name = self._stretch_name(text, scoped, at, is_word)
            found.append(Stretch(name, first, last, end - at, before_word))
            first, at, is_word = last, end, before_word
        return found

    def _stretch_name(self, text: str, scoped: Namer, at: int, is_word: bool) -> bytes:
        """The name of the stretch that begins at a cut. Names of parts have no such mark before them."""
        name = scoped.copy()
        name.update(b"\xff\x01" if is_word else b"\xff\x00")  # in no UTF-8
        name.update(text[at : at + self._stretch_chars].encode())
        return name.digest()

    def _encode(self, texts: list[str], special: bool) -> list[array[int]]:
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except (UnicodeError, TypeError) as error:
            raise ValueError(f"not text: {error!s:.100}") from None
        return [array("I", encoding.ids) for encoding in found]


def _size(piece: PartTokens) -> int:
    return piece.tokens.itemsize * len(piece.tokens)


def _joined(parts: list[array[int]]) -> array[int]:
    ids = array("I")
    ids.frombytes(b"".join([tokens.tobytes() for tokens in parts]))
    return ids


def _ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Tokens that the tokenizer puts before and after every text; None when it does something else."""
    seen = []
    for probe in _PROBES:
        whole = tokenizer.encode(probe)
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        marks = whole.special_tokens_mask
        before = marks.index(0) if 0 in marks else 0
        after = before + len(bare)
        if whole.ids[before:after] != bare:
            return None
        seen.append((whole.ids[:before], whole.ids[after:]))
    return seen[0] if seen[0] == seen[1] else None


class Cutter:
    """Cuts texts for one tokenizer.

    Args:
        tokenizer: the content of its tokenizer.json.
        target_chars: parts are about that long.
        splits_specials: the tokenizer treats special tokens inside a text as plain text.
    """

    def __init__(
        self, tokenizer: dict[str, Any], *, target_chars: int = 1024, splits_specials: bool = False
    ) -> None:
        added = tokenizer.get("added_tokens") or []
        possible = model_is_known(tokenizer.get("model") or {}) and not splits_specials
        possible = possible and not any(token["single_word"] for token in added)
        self._target = target_chars
        self._scan, self._clean = _special_scan(added) if possible else (None, frozenset[str]())
        self.ahead_chars = target_chars + 2 + max((len(token["content"]) for token in added), default=0)
        self._words = possible and words_are_apart(tokenizer, added)
        # a normalizer that puts a mark before every part already stands for the space that the part begins with
        self.drops_space = self._words and prepends_mark(tokenizer.get("normalizer"))

    @property
    def possible(self) -> bool:
        """False when every text is encoded whole."""
        return self._scan is not None or self._words

    def cuts(self, text: str, start: int = 0) -> list[tuple[int, bool]]:
        """(position, is it between two words) of each cut behind `start`, which is one, or 0; ascending."""
        found: list[tuple[int, bool]] = []
        end = len(text)
        if not self.possible or end <= 2 * self._target:
            return found
        specials = self._special_starts(text, start)
        special, word = -1, -1 if self._words else end
        while True:
            low = start + self._target
            if word < low and word != end:
                match = _WORD_END.search(text, low - 1)
                word = match.end() if match else end
            at = word
            if word > low + self._target or word == end:
                while special < low:
                    special = next(specials, end)
                    if special == end:
                        break
                at = min(word, special)
            if at >= end or low >= end:
                return found
            found.append((at, at == word))
            start = at

    def _special_starts(self, text: str, start: int) -> Iterator[int]:
        if self._scan is None:
            return iter(())
        clean = self._clean
        return (match.start() for match in self._scan.finditer(text, start) if match.group() in clean)


def _special_scan(added: list[dict[str, Any]]) -> tuple[re.Pattern[str] | None, frozenset[str]]:
    """A pattern that finds what the tokenizer takes out of raw text first, and those of them to cut before."""
    raw = [token for token in added if not token["normalized"] and token["content"]]
    contents = sorted({token["content"] for token in raw}, key=len, reverse=True)
    clean = {
        token["content"]
        for token in raw
        if not token["lstrip"]
        and not token["rstrip"]
        and not any(char.isspace() for char in token["content"])
        and not any(token["content"] in other and token["content"] != other for other in contents)
    }
    if not clean:
        return None, frozenset()
    # the longest first: the tokenizer takes the leftmost, then the longest
    return re.compile("|".join(map(re.escape, contents))), frozenset(clean)
