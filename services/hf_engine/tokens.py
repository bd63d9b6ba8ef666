"""The model's tokenizer, as requests need it: text and chats to tokens, tokens to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mooncache.errors import ConfigInvalid, InvalidArgument


class ChatTokenizer:
    """A folder's tokenizer with its chat template. Raises ConfigInvalid when there is none."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"{folder} has no tokenizer that can be loaded: {error}") from None
        self._takes_parts = takes_parts(self._tokenizer.chat_template or "")

    def encode(self, text: str, special: bool) -> list[int]:
        """Tokens of a text, with the special tokens that the tokenizer puts around it when `special`."""
        try:
            ids: list[int] = self._tokenizer(text, add_special_tokens=special).input_ids
        except (TypeError, ValueError, UnicodeError) as error:
            raise InvalidArgument(f"prompt: it cannot be tokenised: {error}") from None
        return ids

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_args: Mapping[str, Any],
    ) -> list[int]:
        """Tokens of a chat under the template. Raises InvalidArgument for what the template does not take."""
        if not self._tokenizer.chat_template:
            raise InvalidArgument("messages: the model has no chat template; use /v1/completions.")
        try:
            text = self._tokenizer.apply_chat_template(
                [self._plain(message) for message in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **{name: value for name, value in template_args.items() if name.isidentifier()},
            )
        except Exception as error:  # noqa: BLE001  (a template may raise anything)
            raise InvalidArgument(f"messages: the chat template refuses them: {error}") from None
        return self.encode(text, special=False)

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        """As templates expect it: parts as one text unless the template walks them, arguments as objects."""
        plain = dict(message)
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            plain["content"] = "\n".join(part["text"] for part in content)
        if isinstance(message.get("tool_calls"), list):
            plain["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        return plain

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        """Text of tokens."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text


def _with_object(call: Any) -> Any:
    """A tool call whose arguments, JSON in a string, are an object, as vLLM hands them to templates."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def takes_parts(template: Any) -> bool:
    """True when the template has a loop over a message's content, so that it takes typed parts itself."""
    import jinja2
    from jinja2 import nodes

    if not isinstance(template, str):
        return False
    try:
        tree = jinja2.Environment(autoescape=False).parse(template)  # noqa: S701  (parsed, never rendered)
    except jinja2.TemplateError:
        return False
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        if isinstance(source, nodes.Getattr) and source.attr == "content":
            return True
        item = source.arg if isinstance(source, nodes.Getitem) else None
        if isinstance(item, nodes.Const) and item.value == "content":
            return True
    return False
