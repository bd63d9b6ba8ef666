"""The model's tokenizer, as requests need it: text and chats to tokens, tokens to text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mooncache.errors import ConfigInvalid, InvalidArgument
from mooncache.hf_engine.core.chat import conversation, tool_schemas

# Arguments of the rendering itself: a request may not set them, least of all the template.
_RESERVED = frozenset(
    {
        *(
            "chat_template",
            "conversation",
            "messages",
            "tools",
            "documents",
            "tokenize",
            "padding",
            "truncation",
        ),
        *("max_length", "return_tensors", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask"),
    }
)


class ChatTokenizer:
    """A folder's tokenizer with its chat template. Raises ConfigInvalid when there is none."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"{folder} has no loadable tokenizer: {error}") from None

    def encode(self, text: str, special: bool) -> list[int]:
        """Tokens of a text, with the special tokens that the tokenizer puts around it when `special`."""
        try:
            ids: list[int] = self._tokenizer(text, add_special_tokens=special).input_ids
        except (TypeError, ValueError, UnicodeError) as error:
            raise InvalidArgument(f"prompt: it cannot be tokenised: {error}") from None
        return ids

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a chat under the template. `variables` are the template's own.

        Raises:
            InvalidArgument: what the template does not take.
        """
        named = {name: value for name, value in (variables or {}).items() if value is not None}
        if _RESERVED & named.keys():
            raise InvalidArgument(
                f"chat_template_kwargs: {sorted(_RESERVED & named.keys())[0]} cannot be set."
            )
        template = self._template(tools)
        plain = conversation(
            messages,
            structured=takes_parts(template),
            developer='"developer"' in template or "'developer'" in template,
        )
        schemas = None if tools is None else tool_schemas(tools)
        try:
            text = self._tokenizer.apply_chat_template(
                plain,
                tools=schemas,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **named,
            )
        except Exception as error:  # noqa: BLE001  (a template may raise anything)
            raise InvalidArgument(f"messages: the chat template refuses them: {error}") from None
        return self.encode(text, special=False)

    def _template(self, tools: Any) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(None, tools=tools or None)
        except ValueError:
            raise InvalidArgument("messages: the model has no chat template; use /v1/completions.") from None
        return template

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        """Text of tokens."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text


_takes_parts: dict[str, bool] = {}  # by template; a model has one or two


def takes_parts(template: str) -> bool:
    """True when the template walks the parts of a message's content, directly or in a macro that is given it."""
    if template not in _takes_parts:
        _takes_parts[template] = _walks_content(template)
    return _takes_parts[template]


def _walks_content(template: str) -> bool:
    import jinja2
    from jinja2 import ext, nodes

    environment = jinja2.Environment(autoescape=False, extensions=[ext.loopcontrols])  # noqa: S701  (never rendered)
    try:
        tree = environment.parse(template)
    except jinja2.TemplateError:
        return False

    def reads_content(node: object) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        item = node.arg if isinstance(node, nodes.Getitem) else None
        return isinstance(item, nodes.Const) and item.value == "content"

    given = {
        call.node.name
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Name) and any(reads_content(argument) for argument in call.args)
    }
    inside: set[object] = set()
    for macro in tree.find_all(nodes.Macro):
        names = {argument.name for argument in macro.args}
        for loop in macro.find_all(nodes.For):
            inside.add(loop)
            if macro.name in given and isinstance(loop.iter, nodes.Name) and loop.iter.name in names:
                return True
    for loop in tree.find_all(nodes.For):
        bare = isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and loop not in inside
        if bare or reads_content(loop.iter):
            return True
    return False
