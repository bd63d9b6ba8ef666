"""What cannot be shared ends the start of the engine or of the server, and says why."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncache.errors import ConfigInvalid
from tests.lmcache.package import need_lmcache

need_lmcache()

from lmcache.v1.exceptions import IrrecoverableException  # noqa: E402

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pre_caching_hash_algorithm": "builtin"}, "Use sha256_cbor"),
        ({"remote_serde": "cachegen"}, "remote_serde: cachegen .* Use naive"),
        ({"use_layerwise": True}, "Switch both off"),
        ({"enable_blending": True}, "Switch both off"),
        ({"extra": {"mooncache.modles": {}}}, r"mean mooncache\.models"),
        ({"model": "nobody/knows"}, "neither a folder nor"),
    ],
    ids=str,
)
def test_a_worker_that_cannot_share(worker: Make, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(IrrecoverableException, match=said):
        worker(**settings)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"mooncache.models": {"tiny": "/no/such/folder"}}, "neither a folder nor"),
        ({"base_path": "/tmp"}, r"begin with mooncache\."),
        ({"mooncache.models": "tiny"}, "must be an object"),
    ],
    ids=str,
)
def test_a_server_that_cannot_share(server: Make, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        server(params)


def test_no_cluster(server: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid):
        server({"mooncache.state_dir": str(tmp_path)})


def test_another_version_of_lmcache_is_named(
    server: Make, worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.7.1" if name == "lmcache" else version(name)
    )
    with pytest.raises(ConfigInvalid, match=r"LMCache 0\.7\.1 is not supported"):
        server()
    # LMCache logs what a plug-in says, and goes on without it.
    assert worker().remote.connection is None


def test_a_plugin_of_another_name_is_not_ours(worker: Make) -> None:
    one = worker(
        {
            "remote_storage_plugin.moon.module_path": "mooncache.connectors.lmcache",
            "remote_storage_plugin.moon.class_name": "MooncacheConnectorAdapter",
        },
        remote_storage_plugins=["moon"],
    )
    assert one.remote.connection is None
