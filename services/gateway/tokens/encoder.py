"""Text to token ids; of a text that grows, only what is new is encoded.

A long text is cut where the tokens of the parts are provably the tokens of the whole (cuts.py). Parts that are
complete, that is followed by another part, are remembered. The last part changes when the text grows and is not.

A part is named by a keyed digest of its scope and its text: the texts themselves are not kept, and no scope can be
asked about another's parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from mooncache.gateway.tokens.cuts import model_is_known, prepends_mark, words_are_apart

# One thread encodes unless the environment says otherwise; the library's own would compete with the event loop, and
# handing a short text to one costs more than encoding it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_PROBES = ("a", "word and Word 12")
_WORD_END = re.compile(r"[A-Za-z](?= [A-Za-z0-9])")
_ENTRY_BYTES = 320  # measured: digest, array, two dictionary slots and links


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
        """Ids of the tokens of a text. Raises ValueError for text that is not Unicode (lone surrogates).

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
        self._words = possible and words_are_apart(tokenizer, added)
        # a normalizer that puts a mark before every part already stands for the space that the part begins with
        self.drops_space = self._words and prepends_mark(tokenizer.get("normalizer"))

    @property
    def possible(self) -> bool:
        """False when every text is encoded whole."""
        return self._scan is not None or self._words

    def cuts(self, text: str) -> list[tuple[int, bool]]:
        """(position, is it between two words) of each cut, ascending."""
        found: list[tuple[int, bool]] = []
        end = len(text)
        if not self.possible or end <= 2 * self._target:
            return found
        specials = self._special_starts(text)
        special, word, start = -1, -1 if self._words else end, 0
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

    def _special_starts(self, text: str) -> Iterator[int]:
        if self._scan is None:
            return iter(())
        clean = self._clean
        return (match.start() for match in self._scan.finditer(text) if match.group() in clean)


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


class PieceMemo:
    """Tokens of parts that were encoded before, within a fixed number of bytes: least recently used out first.

    Safe to use from several threads.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(32)
        self.hit_count = 0
        self.miss_count = 0

    @property
    def size_bytes(self) -> int:
        """Memory in use, estimated."""
        return self._bytes

    def namer(self, scope: str) -> hashlib.blake2b:
        """Start of the names of a scope: `copy()` it and `update()` with the piece."""
        name = hashlib.blake2b(key=self._secret, digest_size=32)
        text = scope.encode("utf-8", "surrogatepass")
        name.update(len(text).to_bytes(8, "little") + text)
        return name

    def find(self, names: list[bytes]) -> list[array[int] | None]:
        """What is known of each piece."""
        with self._lock:
            found = [self._entries.get(name) for name in names]
            for name, tokens in zip(names, found, strict=True):
                if tokens is not None:
                    self._entries.move_to_end(name)
            hits = sum(tokens is not None for tokens in found)
            self.hit_count += hits
            self.miss_count += len(names) - hits
        return found

    def keep(self, pieces: list[tuple[bytes, array[int]]]) -> None:
        """Remembers pieces; the arrays must not be changed afterwards."""
        with self._lock:
            for name, tokens in pieces:
                size = _size(tokens)
                if name in self._entries or size > self._bytes_max:
                    continue
                self._entries[name] = tokens
                self._bytes += size
            while self._bytes > self._bytes_max:
                _, tokens = self._entries.popitem(last=False)
                self._bytes -= _size(tokens)


def _size(tokens: array[int]) -> int:
    return _ENTRY_BYTES + tokens.itemsize * len(tokens)
