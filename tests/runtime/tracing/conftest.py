"""A collector where OpenTelemetry is installed, and no tracing left behind by a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncache.config import Config, load
from mooncache.runtime import tracing
from tests.runtime.tracing.collector import Collector


@pytest.fixture(autouse=True)
def _tracing_ends() -> Iterator[None]:
    yield
    tracing.shutdown()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    made = Collector()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(env={}, overrides={"cluster.state_dir": tmp_path})


@pytest.fixture
def traced(tmp_path: Path, collector: Collector) -> Config:
    """A configuration whose traces go to `collector`."""
    return load(env={}, overrides={"cluster.state_dir": tmp_path, "tracing.endpoint": collector.endpoint})
