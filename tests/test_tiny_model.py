"""The small model: the same every time, whole or absent, and read by transformers as any other."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncache import tiny_model
from mooncache.errors import ConfigInvalid, InvalidArgument

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
SMALL = {"layers": 1, "hidden": 64, "heads": 1, "kv_heads": 1, "vocab": 1024, "max_positions": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model") / "small", **SMALL)


def test_a_second_call_changes_nothing(folder: Path) -> None:
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert tiny_model.build(folder, **SMALL) == folder
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    assert {"config.json", "model.safetensors", "tokenizer.json", tiny_model.MARKER} <= set(before)


def test_equal_parameters_make_equal_files(folder: Path, tmp_path: Path) -> None:
    other = tiny_model.build(tmp_path / "other", **SMALL)
    for path in folder.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def test_another_seed_replaces_the_weights(tmp_path: Path) -> None:
    target = tiny_model.build(tmp_path / "m", **SMALL)
    first = (target / "model.safetensors").read_bytes()
    tiny_model.build(target, **SMALL, seed=1)
    assert (target / "model.safetensors").read_bytes() != first
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_several_builders_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: tiny_model.build(tmp_path / "m", **SMALL), range(4)))
    assert set(made) == {tmp_path / "m"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert json.loads((tmp_path / "m" / tiny_model.MARKER).read_text())["vocab"] == 1024


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigInvalid, match="holds files"):
        tiny_model.build(tmp_path, **SMALL)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"kv_heads": 3, "heads": 4}, {"layers": 0}, {"vocab": 100}])
def test_sizes_that_do_not_fit(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        tiny_model.build(tmp_path / "m", **{**SMALL, **wrong})
    assert not (tmp_path / "m").exists()


def test_command_line(tmp_path: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.tiny_model"], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2 and b"usage" in done.stderr


def test_transformers_reads_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.head_dim == 64 and str(model.dtype) == "torch.float32"
    assert len(tokenizer) == 1024 == model.config.vocab_size
    text = "<|start|>user\nnaïve 你好\n<|end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "42"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|start|>system\nBe kind.<|end|>\n<|start|>user\nab<|end|>\n"
        '<|start|>assistant\n<|call|>{"function": {"name": "f"}}<|end|>\n'
        "<|start|>tool\n42<|end|>\n<|start|>assistant\n"
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = tokenizer.apply_chat_template(messages[:1], tokenize=False, tools=tools)
    assert with_tools.startswith('<|start|>system\n<|tools|>[{"type": "function"')
