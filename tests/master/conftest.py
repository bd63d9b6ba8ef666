"""Quiet logs for the simulations: a minute of virtual time writes thousands of lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from mooncache.runtime import logs


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("master", level="error")
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
