"""From the messages of a chat request to text: the model's chat template, rendered as transformers renders it.

vLLM validates a request against typed messages and hands the template only the fields that it knows. This is the same
rule written down; `Unreadable` says that the request holds something else, such as an image.

Templates come from the model, which the operator chose. A template that a client sends is never run: engines refuse
it too.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncache.gateway.tokens.content_format import reads_parts

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# arguments of the rendering itself, which a client may not set through chat_template_kwargs
_RESERVED = frozenset(
    {
        "chat_template", "tokenize", "tools", "messages", "conversation", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask",
    }
)  # fmt: skip
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_BILLING_HEADER = "x-anthropic-billing-header"
_FUNCTION_FIELDS = ("name", "description", "parameters")
_FUNCTION_FIELDS_WHEN_GIVEN = ("strict", "defer_loading")


class Unreadable(Exception):  # noqa: N818 - a reason, not a failure
    """The tokens of this request cannot be known here."""


class ChatTemplate:
    """One compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        self._source = source
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self._structured = reads_parts(environment.parse(source))
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, body: dict[str, object]) -> str:
        """Text of a chat request.

        Raises:
            Unreadable: the request holds what only the engine can judge, or the template refuses it.
        """
        messages = conversation(body.get("messages"), structured=self._structured)
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            messages = _developer_as_system(messages)
        variables = self._variables(body)
        if not variables["continue_final_message"]:
            return self._run(messages, variables)
        if variables["add_generation_prompt"] or "content" not in self._source:
            raise Unreadable("continue_final_message")
        return self._continued(messages, variables)

    def _variables(self, body: dict[str, object]) -> dict[str, object]:
        given = body.get("chat_template_kwargs") or {}
        if not isinstance(given, dict) or _RESERVED & given.keys() or body.get("chat_template") is not None:
            raise Unreadable("chat_template_kwargs")
        effort = body.get("reasoning_effort")
        asked: dict[str, object] = {
            "add_generation_prompt": flag(body, "add_generation_prompt", True),
            "continue_final_message": flag(body, "continue_final_message", False),
        }
        if body.get("documents") is not None:
            asked["documents"] = body["documents"]
        if effort is not None:
            asked["reasoning_effort"] = effort
            if "enable_thinking" not in given:
                asked["enable_thinking"] = effort != "none"
        tools = tool_schemas(body.get("tools"))
        given = {name: value for name, value in given.items() if value is not None and value != "auto"}
        return {**self._special_tokens, "tools": tools, "documents": None, **given, **asked}

    def _run(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        names = {name: value for name, value in variables.items() if name != "continue_final_message"}
        try:
            return self._template.render(messages=messages, **names)
        except Exception as error:  # noqa: BLE001 - the template is a program over the client's values
            raise Unreadable(f"template: {type(error).__name__}") from None

    def _continued(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The text up to where the last message's content ends."""
        last = messages[-1]
        content = last["content"]
        if isinstance(content, list):
            if not content:
                raise Unreadable("continue_final_message")
            text = content[-1]["text"]
            marked: Any = [*content[:-1], {**content[-1], "text": text + _CONTINUE_MARK}]
        else:
            text, marked = content, content + _CONTINUE_MARK
        rendered = self._run([*messages[:-1], {**last, "content": marked}], variables)
        at = rendered.rfind(_CONTINUE_MARK.strip())
        if at < 0 or text.strip() not in rendered:
            raise Unreadable("continue_final_message")
        kept = rendered[at:].startswith(_CONTINUE_MARK)
        return rendered[:at] if kept else rendered[:at].rstrip()


class ChatTemplates:
    """All templates of a folder: the default one, and one for requests with tools where there is one."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._compiled = {
            name: ChatTemplate(source, special_tokens)
            for name, source in sources.items()
            if name in ("default", "tool_use")
        }

    def choose(self, body: dict[str, object]) -> ChatTemplate:
        """The template for a request. Raises Unreadable when the model has none."""
        chosen = self._compiled.get("tool_use") if body.get("tools") else None
        chosen = chosen or self._compiled.get("default")
        if chosen is None:
            raise Unreadable("no chat template")
        return chosen


class _GenerationTag(jinja2.ext.Extension):
    """The block `{% generation %}` marks text for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's way

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_same")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # templates print the local date


def _developer_as_system(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """For templates that do not know the role: developer messages join the system message at the beginning."""
    renamed = [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [at for at, message in enumerate(renamed) if message["role"] == "system"]
    if systems in ([], [0]):
        return renamed
    texts = [text for at in systems if (text := _joined(renamed[at]["content"]))]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def flag(body: dict[str, object], name: str, default: bool) -> bool:
    """A field that is true, false, or not given. Raises Unreadable for anything else."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Unreadable(name)
    return value


def conversation(messages: object, *, structured: bool) -> list[dict[str, Any]]:
    """The template's `messages`.

    Args:
        messages: as sent by the client; not changed.
        structured: the template reads content as a list of parts; otherwise it is one string.

    Raises:
        Unreadable: content that is not text, or nothing that a server would accept.
    """
    if not isinstance(messages, list) or not messages:
        raise Unreadable("messages")
    return [_message(message, structured) for message in messages]


def tool_schemas(tools: object) -> list[dict[str, object]] | None:
    """The template's `tools`: the declared fields in their order; what else the client sent is left out."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise Unreadable("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unreadable("tools")
    deferred = tool.get("defer_loading")
    given = {**function, "defer_loading": function.get("defer_loading", deferred)}
    schema = {name: given.get(name) for name in _FUNCTION_FIELDS}
    schema |= {name: given[name] for name in _FUNCTION_FIELDS_WHEN_GIVEN if given.get(name) is not None}
    return {
        "type": tool.get("type", "function"),
        "function": schema,
        **({} if deferred is None else {"defer_loading": deferred}),
    }


def _message(message: object, structured: bool) -> dict[str, object]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unreadable("role")
    role = message["role"]
    found: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, structured)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            found["tool_calls"] = [_tool_call(call) for call in _list(calls)]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            found["tool_call_id"] = message["tool_call_id"]
        if isinstance(found["content"], list):
            found["content"] = "\n".join(part["text"] for part in found["content"])
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "developer":
        found["tools"] = message.get("tools")
    return found


def _content(content: object, role: str, structured: bool) -> str | list[dict[str, object]]:
    if content is None:
        parts: list[str] = []
    elif isinstance(content, str):
        parts = [content]
    else:
        parts = [text for part in _list(content) if (text := _part(part)) is not None]
    if role == "system":
        parts = [text for part in parts if (text := _without_billing_header(part)) is not None]
    if structured:
        return [{"type": "text", "text": text} for text in parts]
    return "\n".join(text for text in parts if text)


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS or part.get("uuid") is not None:
        raise Unreadable("content")
    text = part.get(_TEXT_PARTS[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise Unreadable("content")
    return text


def _without_billing_header(text: str) -> str | None:
    """A client's attribution line changes with every request; vLLM drops it, and what is then empty."""
    if not text.startswith(_BILLING_HEADER):
        return text
    return text.partition("\n")[2] or None


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Unreadable("tool_calls")
    return {
        "id": call.get("id"),
        "function": {"arguments": _arguments(function.get("arguments")), "name": function.get("name")},
        "type": "function",
    }


def _arguments(given: object) -> dict[str, object]:
    """Templates want an object; anything else counts as empty."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except ValueError:
            return {}
        except RecursionError:
            raise Unreadable("tool_calls") from None
    return given if isinstance(given, dict) else {}


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise Unreadable("list")
    return value
