"""What the gateway reads is what vLLM's own front end computes for the same body."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncache.gateway.tokens import PromptReader
from tests.gateway.tokens.bodies import CALL, CHATS, COMPLETIONS, TOOL, UNREADABLE
from tests.gateway.tokens.model_folders import TEMPLATES, make_folder

pytest.importorskip("vllm", reason="vllm is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

Oracle = Callable[[dict[str, Any], bool], list[list[int]] | None]


@pytest.fixture(scope="module", params=[*TEMPLATES, "begin and end", "llama class"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PromptReader, Oracle]:
    folder = tmp_path_factory.mktemp("model") / "m"
    if request.param == "begin and end":
        make_folder(folder, "chatml", add_bos_token=True, add_eos_token=True, pad_token="<pad>")
    elif request.param == "llama class":
        make_folder(folder, "chatml", kind="llama2", tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    else:
        make_folder(folder, request.param)
    reader = PromptReader.load(folder, cache_bytes=1 << 20)
    assert reader is not None
    return reader, _oracle(folder)


def _oracle(folder: Path) -> Oracle:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    settings_ = VllmConfig(model_config=ModelConfig(model=str(folder), dtype="float32"))
    online = OnlineRenderer(
        settings_.model_config,
        renderer_from_config(settings_),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )

    def tokens(body: dict[str, Any], chat: bool) -> list[list[int]] | None:
        body = copy.deepcopy(body)
        try:
            if chat:
                answer: Any = asyncio.run(online.render_chat(ChatCompletionRequest(**body)))
                answer = answer[1] if isinstance(answer, tuple) else None
            else:
                answer = asyncio.run(online.render_completion(CompletionRequest(**body)))
        except Exception:  # refused by vLLM: nobody cares about its tokens
            return None
        return [one["prompt_token_ids"] for one in answer] if isinstance(answer, list) else None

    return tokens


def _read(reader: PromptReader, body: dict[str, Any], chat: bool) -> list[list[int]] | None:
    before = copy.deepcopy(body)
    prompt = reader.read(body, chat)
    assert body == before, "a body is not changed by reading it"
    return None if prompt is None else [ids.tolist() for ids in prompt.token_ids]


@pytest.mark.parametrize("name", CHATS)
def test_chat(model: tuple[PromptReader, Oracle], name: str) -> None:
    reader, oracle = model
    expected, found = oracle(CHATS[name], True), _read(reader, CHATS[name], True)
    if name in UNREADABLE:
        assert found is None or found == expected
    elif expected is not None:
        assert found == expected


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion(model: tuple[PromptReader, Oracle], name: str) -> None:
    reader, oracle = model
    expected = oracle(COMPLETIONS[name], False)
    assert expected is not None
    assert _read(reader, COMPLETIONS[name], False) == expected


_CONTENT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["the kato", "<|im_start|>user\n", "</s>", " x ", "\n"]),
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=6)), max_size=3),
)
_MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "developer"]), "content": _CONTENT},
            optional={"name": st.text(max_size=4)},
        ),
        st.fixed_dictionaries(
            {"role": st.just("assistant")},
            optional={
                "content": st.one_of(st.none(), _CONTENT),
                "reasoning": st.text(max_size=4),
                "tool_calls": st.lists(st.just(CALL), max_size=2),
            },
        ),
        st.fixed_dictionaries(
            {"role": st.just("tool"), "content": _CONTENT, "tool_call_id": st.text(max_size=3)}
        ),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=_MESSAGES, tools=st.booleans())
def test_any_conversation(
    model: tuple[PromptReader, Oracle], messages: list[dict[str, Any]], tools: bool
) -> None:
    reader, oracle = model
    body = {"messages": messages, **({"tools": [TOOL]} if tools else {})}
    expected = oracle(body, True)
    if expected is not None:
        assert _read(reader, body, True) == expected
