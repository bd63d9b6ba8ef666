"""What every test may use."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's MOONCACHE_* variables must not decide whether tests pass."""
    for name in list(os.environ):
        if name.startswith("MOONCACHE_") and not name.startswith(("MOONCACHE_TEST_", "MOONCACHE_BUILD_")):
            monkeypatch.delenv(name)
