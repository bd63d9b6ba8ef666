"""Tokens need the native hash; where it is not built yet the published implementation stands in."""

from __future__ import annotations

import pytest

from mooncache import _native, auth


@pytest.fixture(autouse=True)
def _hash(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(_native, "blake3_keyed"):
        blake3 = pytest.importorskip("blake3").blake3
        monkeypatch.setattr(auth, "keyed_hash", lambda key, data: blake3(data, key=key).digest())
        monkeypatch.setattr(auth, "plain_hash", lambda data: blake3(data).digest())
