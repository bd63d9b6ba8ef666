"""Services under test: private state folder, and a hash when the native one is not built."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache import _native, auth
from mooncache.config import Config, load


@pytest.fixture(autouse=True)
def _hash(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(_native, "blake3_keyed"):
        blake3 = pytest.importorskip("blake3").blake3
        monkeypatch.setattr(auth, "keyed_hash", lambda key, data: blake3(data, key=key).digest())
        monkeypatch.setattr(auth, "plain_hash", lambda data: blake3(data).digest())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(env={}, overrides={"cluster.state_dir": tmp_path})
