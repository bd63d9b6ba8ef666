"""What all tests of the worker share."""

from __future__ import annotations

import pytest

from mooncache.worker.background import run_engine


@pytest.fixture(autouse=True)
def _short_health_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of an engine are seen at once, so that tests need not wait for them."""
    monkeypatch.setattr(run_engine, "HEALTH_INTERVAL_S", 0.05)
