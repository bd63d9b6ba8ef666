"""What every test may use."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# No test judges time: an example that is slow on a busy machine is no failure.
settings.register_profile("mooncache", deadline=None)
settings.load_profile("mooncache")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's MOONCACHE_* variables must not decide whether tests pass."""
    for name in list(os.environ):
        if name.startswith("MOONCACHE_") and not name.startswith(("MOONCACHE_TEST_", "MOONCACHE_BUILD_")):
            monkeypatch.delenv(name)
