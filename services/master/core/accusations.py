"""Who says that a writer's blocks are wrong, and when that is enough to quarantine it.

Idea: two engines that compute different blocks contradict each other, and the pool cannot know which one is broken.
So a verifier alone may have few writers quarantined at a time (`alone_max`); for each further one a second verifier has
to say the same. A broken verifier then does that much harm and no more, while a broken writer among many is found by
several. A verifier that is quarantined itself is not heard.

Invariant (`check`): bounded, and what is remembered is about writers that are not quarantined.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from mooncache.runtime.quarantine import VERIFIERS_MAX, QuarantineTable

WRITERS_MAX: Final = 1024
"""Accused writers that are remembered; the longest unheard of are forgotten first."""


class Accusations:
    """What verifiers said of writers that are not quarantined. `alone_max` 0: every quarantine takes two verifiers."""

    def __init__(self, alone_max: int) -> None:
        self.alone_max = alone_max
        self._said: OrderedDict[int, list[str]] = OrderedDict()

    def accuse(
        self, writer_id: int, verifier: str, verifier_id: int, table: QuarantineTable
    ) -> tuple[str, ...]:
        """A verifier found wrong blocks of a writer. The verifiers for whose word it is quarantined; none: not yet."""
        quarantined = table.quarantined
        if writer_id in quarantined or verifier_id in quarantined:
            return ()
        said = self._said.pop(writer_id, [])
        if verifier not in said and len(said) < VERIFIERS_MAX:
            said.append(verifier)
        alone = sum(1 for number in quarantined if table.entries[number].verifiers == (verifier,))
        if len(said) > 1 or alone < self.alone_max:
            return tuple(sorted(said))
        self._said[writer_id] = said
        while len(self._said) > WRITERS_MAX:
            self._said.popitem(last=False)
        return ()

    def forget(self, writer_id: int) -> None:
        """What was said of a writer counts no more."""
        self._said.pop(writer_id, None)

    def check(self) -> None:
        """The invariant; for tests."""
        assert len(self._said) <= WRITERS_MAX
        assert all(1 <= len(said) <= VERIFIERS_MAX for said in self._said.values())
