"""Requests under which engines ended: one that meets a defect of an engine must not take all engines down in turn.

A request gets one more try after an engine ended under it. Its digest is remembered for a while, until a request of
that digest is served: a request on an engine that was killed is served by the next one, and forgotten. A digest
that goes on ending engines is refused.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from mooncache.errors import InvalidArgument
from mooncache.gateway.core import faults

WINDOW_S: Final = 600.0
DIGEST_COUNT_MAX: Final = 10_000
TRIES_MAX: Final = 2
DEATHS_MAX: Final = 3
_END_BYTES: Final = 16 << 10  # some thousands of tokens of the first and of the last messages


def digest_of(path: str, forward: bytes) -> bytes:
    """What makes two requests the same: where they go, their length, how they begin and end."""
    found = hashlib.sha256(path.encode())  # processors have instructions for it
    found.update(len(forward).to_bytes(8, "little"))
    found.update(memoryview(forward)[:_END_BYTES])
    found.update(memoryview(forward)[_END_BYTES:][-_END_BYTES:])
    return found.digest()


class Offenders:
    """Deaths of engines by the digest of the request; the oldest are forgotten first. `now_s` may not go back."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[float, int]] = OrderedDict()

    def died(self, digest: bytes, now_s: float) -> int:
        """An engine ended under such a request; returns how many have."""
        count = self.deaths(digest, now_s) + 1
        self._deaths[digest] = (now_s, count)
        self._deaths.move_to_end(digest)
        if len(self._deaths) > DIGEST_COUNT_MAX:
            self._deaths.popitem(last=False)
        return count

    def deaths(self, digest: bytes, now_s: float) -> int:
        """Engines that ended under such requests since one was served, within the window since the last."""
        at_s, count = self._deaths.get(digest, (now_s, 0))
        return count if now_s - at_s < WINDOW_S else 0

    def refuse_offender(self, digest: bytes, now_s: float) -> None:
        """Raises Refusal when engines went on ending under such requests."""
        deaths = self.deaths(digest, now_s)
        if deaths >= DEATHS_MAX:
            text = (
                f"{deaths} engines ended while they served this request, and none served it; it is not tried again "
                f"for {WINDOW_S / 60:.0f} minutes. Change the request."
            )
            raise faults.refuse(InvalidArgument(text), code="request_ends_engines")

    def served(self, digest: bytes) -> None:
        """Such a request was served: it was not what ended them."""
        self._deaths.pop(digest, None)

    def check(self) -> None:
        """Invariant for tests."""
        assert len(self._deaths) <= DIGEST_COUNT_MAX
