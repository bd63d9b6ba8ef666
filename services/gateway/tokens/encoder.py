"""Text to token ids; of a text that grows, only what is new is encoded.

A long text is cut where the tokens of the parts are provably the tokens of the whole (cuts.py). Parts that are
complete, that is followed by another part, are remembered. The last part changes when the text grows and is not.
"""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import dataclass

from tokenizers import Tokenizer

from mooncache.gateway.tokens.cuts import Cutter
from mooncache.gateway.tokens.memo import PieceMemo

# One thread encodes unless the environment says otherwise; the library's own would compete with the event loop, and
# handing a short text to one costs more than encoding it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_PROBES = ("a", "word and Word 12")


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """A text on its way: parts that are known, and parts that have to be encoded."""

    text: str
    special: bool
    parts: list[str]
    names: list[bytes]
    found: list[array[int] | None]
    new_chars: int


class Encoder:
    """One tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = 0, piece_chars: int = 1024) -> None:
        self._tokenizer = tokenizer
        self._ends = _ends(tokenizer)
        self.memo = PieceMemo(cache_bytes)
        self._cutter: Cutter | None = None
        if cache_bytes:
            description = json.loads(tokenizer.to_str())
            splits = bool(tokenizer.encode_special_tokens)
            cutter = Cutter(description, target_chars=piece_chars, splits_specials=splits)
            self._cutter = cutter if cutter.possible else None

    def encode(self, text: str, *, add_special_tokens: bool, scope: str = "") -> array[int]:
        """Ids of the tokens of a text. Raises ValueError for text that is no Unicode (lone surrogates).

        scope: whose remembered parts may be used; so that the time does not reveal what others have asked.
        """
        return self.finish(self.plan(text, add_special_tokens=add_special_tokens, scope=scope))

    def plan(self, text: str, *, add_special_tokens: bool, scope: str = "") -> EncodingPlan:
        """Find the known prefix of a text, in about 1 ms for 128 thousand characters. Raises as `encode`."""
        cutter = self._cutter
        cuts = cutter.cuts(text) if cutter and (not add_special_tokens or self._ends) else []
        if not cutter or not cuts:
            return EncodingPlan(text, add_special_tokens, [text], [], [None], len(text))
        parts, names, start, is_word = [], [], 0, False
        scoped = self.memo.namer(scope)
        for at, next_is_word in [*cuts, (len(text), False)]:
            part = text[start + 1 : at] if is_word and cutter.drops_space else text[start:at]
            parts.append(part)
            start, is_word = at, next_is_word
        for part in parts[:-1]:
            name = scoped.copy()
            name.update(part.encode())
            names.append(name.digest())
        found = [*self.memo.find(names), None]
        new_chars = sum(len(part) for part, tokens in zip(parts, found, strict=True) if tokens is None)
        return EncodingPlan(text, add_special_tokens, parts, names, found, new_chars)

    def finish(self, plan: EncodingPlan) -> array[int]:
        """Encodes what is missing. Raises as `encode`."""
        if len(plan.parts) == 1:
            return self._encode([plan.text], plan.special)[0]
        missing = [at for at, tokens in enumerate(plan.found) if tokens is None]
        found = list(plan.found)
        for at, tokens in zip(missing, self._encode([plan.parts[at] for at in missing], False), strict=True):
            found[at] = tokens
        known = [tokens for tokens in found if tokens is not None]
        self.memo.keep([(plan.names[at], known[at]) for at in missing if at < len(plan.names)])
        before, after = self._ends or ([], [])
        ids = array("I", before if plan.special else ())
        ids.frombytes(b"".join([tokens.tobytes() for tokens in known]))
        ids.extend(after if plan.special else ())
        return ids

    def _encode(self, texts: list[str], special: bool) -> list[array[int]]:
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except (UnicodeError, TypeError) as error:
            raise ValueError(f"not text: {error!s:.100}") from None
        return [array("I", encoding.ids) for encoding in found]


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
