"""SGLang learns of the transfer backend by its own plug-ins, and a version that is not known does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from enum import Enum
from pathlib import Path

import pytest

from mooncache.errors import ConfigInvalid
from tests.sglang.package import need_sglang

need_sglang()

from mooncache.connectors.sglang.handover import plugin  # noqa: E402


def install(folder: Path) -> None:
    """A distribution with the entry point of pyproject.toml."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = text.split('[project.entry-points."sglang.srt.plugins"]\n')[1].split("\n\n")[0].replace('"', "")
    info = folder / "engine_plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-plugins\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{group}\n")


def test_the_entry_point_makes_it_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.plugins as sglang_plugins
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
    from sglang.srt.managers import disagg_service
    from sglang.srt.server_args import ServerArgs

    install(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sglang_plugins, "_plugins_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", plugin.BACKEND)
    sglang_plugins.load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    chosen = parser.parse_args(["--model-path", "any", "--disaggregation-transfer-backend", "mooncache"])
    backend = TransferBackend(chosen.disaggregation_transfer_backend)
    assert backend is TransferBackend["MOONCACHE"]
    assert list(TransferBackend).count(backend) == 1
    found = disagg_service.get_kv_class(backend, KVClassType.MANAGER)
    assert found.__module__ == "mooncache.connectors.sglang.handover.backend"
    assert disagg_service.get_kv_class(backend, KVClassType.KVARGS).__name__ == "KVArgs"
    theirs = disagg_service.get_kv_class(TransferBackend.FAKE, KVClassType.MANAGER)
    assert theirs.__module__.startswith("sglang.")


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.7.0")
    with pytest.raises(ConfigInvalid, match=r"SGLang 0\.7\.0 is not supported"):
        plugin.register()


def test_a_member_is_found_in_every_way() -> None:
    class Colour(Enum):
        RED = "red"

    blue = plugin.add_member(Colour, "BLUE", "blue")
    assert Colour("blue") is Colour["BLUE"] is blue
    assert [each.value for each in Colour] == ["red", "blue"]
    assert isinstance(blue, Colour)
    assert blue != Colour.RED
