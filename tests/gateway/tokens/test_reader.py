"""The prompt reader without an engine: what it refuses to know, public prefixes, threads, loading."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.gateway.tokens import PromptReader
from tests.gateway.tokens.model_folders import TEMPLATES, make_folder

_TALK = [
    {"role": "system", "content": "the kato and the ring " * 40},
    {"role": "user", "content": "the ring and the kato " * 40},
    {"role": "user", "content": "and so on"},
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    loaded = PromptReader.load(
        make_folder(tmp_path_factory.mktemp("reader") / "m", "tools"), cache_bytes=1 << 20
    )
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user"}, 3]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
        {"messages": _TALK, "tools": "all"},
        {"messages": _TALK, "tools": []},
        {"messages": _TALK, "tools": [{"function": {}}]},
        {"messages": _TALK, "chat_template": "{{ 1 }}"},
        {"messages": _TALK, "chat_template_kwargs": {"tokenize": True}},
        {"messages": _TALK, "chat_template_kwargs": [1]},
        {"messages": _TALK, "add_generation_prompt": "maybe"},
        {"messages": _TALK, "add_special_tokens": 1},
        {"messages": _TALK, "truncate_prompt_tokens": 5},
        {"messages": _TALK, "continue_final_message": True},
        {"messages": _TALK, "documents": 7},
        {"messages": [{"role": "bad", "content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}]},
    ],
)
def test_chats_that_only_the_engine_can_judge(reader: PromptReader, body: dict[str, Any]) -> None:
    assert reader.read(body, True) is None


@pytest.mark.parametrize(
    "prompt", [None, 5, [], {}, [1, "a"], [[1], "a"], [[]], [-1], [1.5], [True], [1 << 32], "\udfff"]
)
def test_prompts_that_are_none(reader: PromptReader, prompt: Any) -> None:
    assert reader.read({"prompt": prompt}, False) is None
    assert reader.read({"prompt": prompt, "prompt_embeds": "x"}, False) is None


def test_texts_and_counts(reader: PromptReader) -> None:
    prompt = reader.read({"prompt": ["one", "two three"]}, False)
    assert prompt is not None
    assert prompt.texts == ["one", "two three"]
    assert prompt.token_count == sum(len(ids) for ids in prompt.token_ids) > 2
    ids = reader.read({"prompt": [[1, 2], [3]]}, False)
    assert ids is not None
    assert ([list(one) for one in ids.token_ids], ids.texts) == ([[1, 2], [3]], [None, None])


@pytest.mark.parametrize("chars", [10, 100_000])
async def test_in_the_loop_and_in_threads(reader: PromptReader, chars: int) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": (f"{number} the kato and the ring " * chars)[:chars]}]}
        for number in range(8)
    ]
    expected = [reader.read(body, True, scope="other") for body in bodies]
    found = await asyncio.gather(*(reader.read_async(body, True, scope="one") for body in [*bodies, {}]))
    assert found == [*expected, None]


def test_public_tokens_are_those_of_the_first_messages_alone(reader: PromptReader) -> None:
    body: dict[str, Any] = {"messages": _TALK}
    prompt = reader.read(body, True)
    assert prompt is not None
    alone = reader.read({"messages": _TALK[:2], "add_generation_prompt": False}, True)
    assert alone is not None

    def public(count: Any, **more: Any) -> int:
        return reader.public_tokens({**body, **more, "mooncache": {"public_messages": count}}, prompt)

    assert public(2) == len(alone.token_ids[0])
    assert 0 < public(1) < public(2) < public(9) < len(prompt.token_ids[0])
    assert [public(count) for count in (0, -1, None, True, "2", 1.5)] == [0] * 6
    assert reader.public_tokens(body, prompt) == 0
    assert reader.public_tokens({**body, "mooncache": 3}, prompt) == 0


def test_private_tools_are_never_in_the_public_part(reader: PromptReader) -> None:
    tool = {"type": "function", "function": {"name": "private", "parameters": {}}}
    body = {"messages": _TALK, "tools": [tool], "mooncache": {"public_messages": 2}}
    prompt = reader.read(body, True)
    assert prompt is not None
    public = reader.public_tokens(body, prompt)
    without = reader.read({"messages": _TALK}, True)
    assert without is not None
    assert prompt.token_ids[0][:public] == without.token_ids[0][:public]
    assert public < 5  # the tools come first in this template


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert PromptReader.load(tmp_path) is None
    assert PromptReader.load(tmp_path / "missing") is None


def test_broken_folders(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "chatml")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        PromptReader.load(folder)
    folder = make_folder(tmp_path / "n", "chatml")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="does not hold a JSON object"):
        PromptReader.load(folder)


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "chatml")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reader = PromptReader.load(folder)
    assert reader is not None
    assert reader.read({"messages": _TALK}, True) is None
    assert reader.read({"prompt": "x"}, False) is not None


def test_templates_in_files_win(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "chatml")
    (folder / "chat_template.jinja").write_text("a{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("b{{ tools | length }}")
    reader = PromptReader.load(folder)
    assert reader is not None
    tool = {"type": "function", "function": {"name": "f"}}
    plain, tools = (reader.read({"messages": _TALK, **more}, True) for more in ({}, {"tools": [tool]}))
    assert plain is not None and tools is not None
    assert plain.texts == ["a" + _TALK[0]["content"]]
    assert tools.texts == ["b1"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_reads_a_conversation(tmp_path: Path, template: str) -> None:
    reader = PromptReader.load(make_folder(tmp_path / "m", template))
    assert reader is not None
    assert reader.read({"messages": _TALK}, True) is not None
