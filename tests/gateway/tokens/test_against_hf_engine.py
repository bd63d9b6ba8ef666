"""What the gateway reads is what the small engine on transformers computes for the same body."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.errors import InvalidArgument
from mooncache.gateway.tokens import PromptReader
from tests.gateway.tokens.bodies import CHATS, COMPLETIONS
from tests.gateway.tokens.model_folders import TEMPLATES, make_folder

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

# What only vLLM does: fields that this engine does not know, and a line of one client that it leaves where it is. Such
# requests have other tokens here than the gateway believes; they are served, without hits.
_OTHERS = {
    "special tokens",
    "documents",
    "own template",
    "truncated",
    "billing header",
    "billing header only",
}
_PASSED_ON = ("add_generation_prompt", "continue_final_message", "tools")


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_and_texts(tmp_path: Path, template: str) -> None:
    from mooncache.hf_engine.tokens import ChatTokenizer

    folder = make_folder(tmp_path / "m", template)
    reader, engine = PromptReader.load(folder), ChatTokenizer(folder)
    assert reader is not None
    compared = 0
    for name, body in CHATS.items():
        if name in _OTHERS:
            continue
        variables = dict(body.get("chat_template_kwargs") or {})
        if (effort := body.get("reasoning_effort")) is not None:
            variables |= {"enable_thinking": effort != "none", "reasoning_effort": effort}
        if "add_generation_prompt" in variables:
            continue  # a request that sets it twice; the engines differ
        passed_on = {field: body[field] for field in _PASSED_ON if field in body}
        try:
            expected = engine.encode_chat(body["messages"], variables=variables, **passed_on)
        except InvalidArgument:
            continue
        prompt = reader.read(body, True)
        assert prompt is not None, name
        assert prompt.token_ids[0].tolist() == expected, name
        compared += 1
    assert compared > 15
    for body in COMPLETIONS.values():
        prompt = reader.read(body, False)
        assert prompt is not None
        if isinstance(body["prompt"], str):
            special = body.get("add_special_tokens", True)
            assert prompt.token_ids[0].tolist() == engine.encode(body["prompt"], special)
