"""Engines name folders of their own machines: the gateway takes one that it has, too, with the same content."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mooncache import auth
from mooncache.gateway.core.fleet import EngineInstance, FleetModel, FleetView
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.tokenizers import Tokenizers
from mooncache.runtime.clock import ManualClock
from mooncache.runtime.metrics import Metrics
from tests.gateway.model_folder import instance_fields, make_tokenizer, passport_of

TOKEN = auth.Token("default", admin=True, key=b"k" * 32)


def tokenizers(*folders: Path) -> Tokenizers:
    stats = GatewayMetrics(Metrics("gateway"))
    own = tuple(map(str, folders))
    return Tokenizers(
        lambda: TOKEN, ManualClock(), stats, cache_bytes=1 << 20, threads=1, public_prefix=False, folders=own
    )


def model_at(folder: Path, *paths: str) -> FleetModel:
    """A model whose engines name these paths and have the content of `folder`."""
    return FleetModel("m", tokenizer_paths=paths, passport=passport_of(folder))


def other_tokenizer(folder: Path) -> Path:
    made = make_tokenizer(folder)
    config = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "another"}))
    return made


async def chosen(found: Tokenizers, model: FleetModel) -> str:
    """The folder whose tokenizer is used; "" when none is."""
    await found.prepare(model)
    source = found.source(model, "salt")
    return source.folder if source is not None else ""


async def test_the_first_folder_with_the_engines_content(tokenizer_folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(tokenizer_folder, here)
    other, missing = other_tokenizer(tmp_path / "other"), str(tmp_path / "elsewhere")
    found = tokenizers()
    try:
        model = model_at(tokenizer_folder, missing, str(other), str(here))
        assert await chosen(found, model) == str(here)
        assert await chosen(found, replace(model, tokenizer_paths=(str(here),))) == str(here)
    finally:
        found.close()


async def test_a_folder_of_its_own(tokenizer_folder: Path, tmp_path: Path) -> None:
    """No engine's folder is on this machine, and one of two of its own has the content."""
    found = tokenizers(other_tokenizer(tmp_path / "other"), tokenizer_folder)
    try:
        assert await chosen(found, model_at(tokenizer_folder, "/no/such")) == str(tokenizer_folder)
    finally:
        found.close()


async def test_none_is_the_engines(tokenizer_folder: Path, tmp_path: Path) -> None:
    found = tokenizers(other_tokenizer(tmp_path / "other"))
    try:
        assert await chosen(found, model_at(tokenizer_folder, "/no/such")) == ""
        later = model_at(tokenizer_folder, "/no/such", str(tokenizer_folder))
        assert await chosen(found, later) == str(tokenizer_folder), (
            "another engine names a folder that is here"
        )
    finally:
        found.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_model_has_the_folders_of_all_its_engines(tokenizer_folder: Path, order: tuple[int, int]) -> None:
    fields = instance_fields(tokenizer_folder)
    passport_json = str(fields["passport_json"])
    two = [
        EngineInstance("a", model="m", tokenizer_path="/a", passport_json=passport_json),
        EngineInstance("b", model="m", tokenizer_path="/b", passport_json=passport_json),
    ]
    view = FleetView()
    view.apply(1, [two[at] for at in order], 0.0, 0.0)
    assert set(view.models["m"].tokenizer_paths) == {"/a", "/b"}
