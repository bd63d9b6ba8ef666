"""Digests of models: equal exactly when the bytes are, remembered, and never wrong because of the memory."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from mooncache.errors import ConfigInvalid
from mooncache.kvcache import identity

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-00001.safetensors").write_bytes(os.urandom(3 * MIB))
    (folder / "model-00002.safetensors").write_bytes(b"x" * 100)
    (folder / "config.json").write_text('{"hidden_size": 8, "layers": 2, "_name_or_path": "/somewhere"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_weights_differ_when_a_byte_or_a_name_differs(model: Path) -> None:
    first = identity.weights_digest(model)
    assert first == identity.weights_digest(str(model))
    with (model / "model-00001.safetensors").open("r+b") as file:
        file.seek(2 * MIB)
        byte = file.read(1)[0]
        file.seek(2 * MIB)
        file.write(bytes([byte ^ 1]))
    second = identity.weights_digest(model)
    assert second != first
    (model / "model-00002.safetensors").rename(model / "model-00003.safetensors")
    assert identity.weights_digest(model) not in {first, second}


def test_chunks_cover_the_whole_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_CHUNK_BYTES", MIB)
    seen = {identity.weights_digest(model)}
    for at in (0, MIB, 3 * MIB - 1):
        with (model / "model-00001.safetensors").open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x80]))
        seen.add(identity.weights_digest(model))
    assert len(seen) == 4


def test_digests_are_remembered_by_size_mtime_and_inode(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    first = identity.weights_digest(model, state_dir=state)
    assert stat.S_IMODE((state / identity.CACHE_FILE).stat().st_mode) == 0o600
    hashed: list[Path] = []
    real = identity._file_digest
    monkeypatch.setattr(identity, "_file_digest", lambda path: hashed.append(path) or real(path))
    assert identity.weights_digest(model, state_dir=state) == first
    assert hashed == []
    os.utime(model / "model-00002.safetensors", ns=(1, 1))
    assert identity.weights_digest(model, state_dir=state) == first
    assert [path.name for path in hashed] == ["model-00002.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"version": 1}',
        b'{"version": 2, "files": []}',
        b'{"version": 9, "files": {}}',
    ],
)
def test_a_damaged_memory_is_as_good_as_none(model: Path, tmp_path: Path, damage: bytes) -> None:
    first = identity.weights_digest(model)
    (tmp_path / identity.CACHE_FILE).write_bytes(damage)
    assert identity.weights_digest(model, state_dir=tmp_path) == first
    assert json.loads((tmp_path / identity.CACHE_FILE).read_bytes())["files"]


def test_entries_that_make_no_sense_are_not_believed(model: Path, tmp_path: Path) -> None:
    first = identity.weights_digest(model, state_dir=tmp_path)
    content = json.loads((tmp_path / identity.CACHE_FILE).read_bytes())
    for path in content["files"]:
        content["files"][path][-1] = "short"
    (tmp_path / identity.CACHE_FILE).write_text(json.dumps(content))
    assert identity.weights_digest(model, state_dir=tmp_path) == first


def test_a_state_folder_that_cannot_be_written_costs_only_time(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert identity.weights_digest(model, state_dir=blocked) == identity.weights_digest(model)


def test_config_is_equal_for_equal_content(model: Path) -> None:
    first = identity.config_digest(model)
    (model / "config.json").write_text('{"layers":2,"hidden_size":8,"transformers_version":"5"}')
    assert identity.config_digest(model) == first
    (model / "config.json").write_text('{"layers":3,"hidden_size":8}')
    assert identity.config_digest(model) != first


def test_a_file_rewritten_in_place_with_its_mtime_kept_is_hashed_again(model: Path, tmp_path: Path) -> None:
    """As `rsync --inplace -t`, image builds and object mounts leave them."""
    first = identity.weights_digest(model, state_dir=tmp_path)
    path = model / "model-00002.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"y" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )
    assert identity.weights_digest(model, state_dir=tmp_path) != first


def test_the_chat_template_counts_as_part_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    seen = [identity.tokenizer_digest(model)]

    def new() -> str:
        found = identity.tokenizer_digest(model)
        assert found not in seen
        seen.append(found)
        return found

    settings = model / "tokenizer_config.json"
    settings.write_text('{"chat_template": "a", "name_or_path": "/here"}')
    new()
    settings.write_text('{"name_or_path": "/there", "chat_template": "a"}')
    assert identity.tokenizer_digest(model) == seen[-1]  # where it comes from says nothing
    settings.write_text('{"chat_template": "b"}')
    new()
    settings.write_text('{"chat_template": "b", "bos_token": "<s>"}')
    new()
    (model / "chat_template.jinja").write_text("c")
    new()
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    new()
    given = tmp_path / "mine.jinja"
    given.write_text("{{ messages }}")
    by_file = identity.tokenizer_digest(model, chat_template=str(given))
    assert by_file == identity.tokenizer_digest(model, chat_template="{{ messages }}")
    assert by_file not in seen
    settings.write_text("[")
    with pytest.raises(ConfigInvalid, match="not JSON"):
        identity.tokenizer_digest(model)


def test_tokenizer_files(model: Path) -> None:
    first = identity.tokenizer_digest(model)
    (model / "vocab.json").write_text("{}")
    assert identity.tokenizer_digest(model) == first  # tokenizer.json says it all
    (model / "tokenizer.json").unlink()
    second = identity.tokenizer_digest(model)
    assert second != first
    (model / "merges.txt").write_text("a b")
    assert identity.tokenizer_digest(model) not in {first, second}
    (model / "merges.txt").unlink()
    (model / "vocab.json").unlink()
    assert identity.tokenizer_digest(model) == identity.NO_TOKENIZER


def test_dummy_weights_are_named_by_seed_and_configuration(model: Path) -> None:
    first = identity.weights_digest(model, load_format="dummy", seed=3)
    assert first == f"dummy:3:{identity.config_digest(model)}"
    assert first != identity.weights_digest(model, load_format="dummy", seed=4)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigInvalid, match="no weight files"):
        identity.weights_digest(tmp_path)
    with pytest.raises(ConfigInvalid, match=r"config\.json"):
        identity.config_digest(tmp_path)
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        identity.weights_digest(tmp_path / "nowhere")
    with pytest.raises(ConfigInvalid, match="neither a folder"):
        identity.resolve_model("nobody/nothing-at-all")
    assert identity.resolve_model(str(tmp_path)) == tmp_path
