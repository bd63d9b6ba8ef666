"""What the connector's tests share: a model, a pool that breaks on demand, and makers of harnesses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.harness import LAYERS, Harness, Make
from tests.kvcache.faulty import FaultyPool


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    from mooncache import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyPool:
    """The pool that connectors of this test connect to."""
    from mooncache.connectors.vllm import connector

    pool = FaultyPool()
    monkeypatch.setattr(connector, "connect_pool", lambda **_: lambda: pool)
    return pool


@pytest.fixture
def make(model_dir: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes harnesses that are closed at the end."""
    made: list[Harness] = []

    def build(extra: dict[str, Any] | None = None, *, model: Path = model_dir, **settings: Any) -> Harness:
        # The model computes at once: whatever the pool has would be computed. Tests of that choice turn it on.
        state = {"mooncache.state_dir": str(tmp_path / "state"), "mooncache.break_even": False}
        made.append(Harness(model, {**state, **(extra or {})}, **settings))
        return made[-1]

    yield build
    for harness in made:
        harness.close()
