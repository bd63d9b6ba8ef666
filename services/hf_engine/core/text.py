"""Tokens become text as they come: no broken characters, and nothing that belongs to a stop string.

Idea: a token may end in the middle of a UTF-8 character, so text is given out only when it does not end in a
replacement character. Text that may be the beginning of a stop string is held back until it is clear that it is not.
Whole and streamed answers come from the same code, so they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_PENDING_MAX = 16

DecodeTokens = Callable[[list[int]], str]


class TextStream:
    """Text from tokens, up to a stop string. `stopped` is the stop string found, "" before that."""

    def __init__(self, decode: DecodeTokens, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._ids: list[int] = []
        self._context = 0  # tokens before this one do not influence what comes
        self._read = 0  # tokens whose text is in `_text`
        self._text = ""  # decoded and not given out
        self.stopped = ""

    def push(self, token: int) -> str:
        """The text that is certain after one more token."""
        if self.stopped:
            return ""
        self._ids.append(token)
        self._grow(len(self._ids) - self._read > _PENDING_MAX)
        return self._give(self._hold)

    def finish(self) -> str:
        """The rest, at the end of the answer."""
        if self.stopped:
            return ""
        self._grow(True)
        return self._give(0)

    def _grow(self, force: bool) -> None:
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        if len(text) > len(known) and (force or not text.endswith(_BROKEN)):
            self._text += text[len(known) :]
            self._context, self._read = self._read, len(self._ids)

    def _give(self, hold: int) -> str:
        places = [(self._text.find(stop), stop) for stop in self._stops if stop in self._text]
        if places:
            place, self.stopped = min(places)
            given, self._text = self._text[:place], ""
            return given
        cut = max(0, len(self._text) - hold)
        given, self._text = self._text[:cut], self._text[cut:]
        return given
