"""What a run does to the process that it runs in."""

from __future__ import annotations

import gc

import pytest

from tests.simulate.small import cluster, conversations, run


def test_a_run_leaves_the_collector_as_it_was() -> None:
    """Also one that breaks off: while it runs, cycles are looked for seldom."""
    before, within = gc.get_threshold(), []

    def breaks(*_: object) -> None:
        within.append(gc.get_threshold())
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        run(conversations(5, 1.0, 1), cluster(), on_decision=breaks)
    assert within != [before]
    assert gc.get_threshold() == before
