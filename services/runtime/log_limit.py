"""How many info lines of one event are written in a second. Warnings and errors are never counted here.

A pure decision: the time is passed in. What was left out is reported once its second is over, so no line is missing
without a number that says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Second:
    """One event in one second."""

    begun_s: float
    written: int = 0
    left_out: int = 0


class LineLimit:
    """The first `lines_per_s` lines of each event in each second; 0 means all. Events come from a catalogue, so few."""

    def __init__(self, lines_per_s: int) -> None:
        self._lines_per_s = lines_per_s
        self._seconds: dict[str, _Second] = {}

    def admit(self, event: str, now_s: float) -> bool:
        """Whether this line is written. Ask `over` first: it forgets the seconds that it reports."""
        if not self._lines_per_s:
            return True
        second = self._seconds.get(event)
        if second is None or (now_s >= second.begun_s + 1.0 and not second.left_out):
            second = self._seconds[event] = _Second(now_s)
        if second.written < self._lines_per_s:
            second.written += 1
            return True
        second.left_out += 1
        return False

    def over(self, now_s: float) -> list[tuple[str, int]]:
        """Events with the number of their lines that were left out, of seconds that are over; each is reported once."""
        ended = [(e, s.left_out) for e, s in self._seconds.items() if s.left_out and now_s >= s.begun_s + 1.0]
        for event, _ in ended:
            del self._seconds[event]
        return ended

    def rest(self) -> list[tuple[str, int]]:
        """The same of seconds that are not over; for the end of a process."""
        return self.over(float("inf"))

    def check(self) -> None:
        """Nothing is left out before the limit is reached."""
        for second in self._seconds.values():
            assert second.written <= self._lines_per_s
            assert not second.left_out or second.written == self._lines_per_s
