"""Chat templates: found in a tokenizer's folder, rendered as transformers renders them.

Templates come from the model, which the operator chose. A template that a client sends is never run: engines refuse
it too.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncache.gateway.tokens.content_format import reads_parts
from mooncache.gateway.tokens.messages import Unreadable, conversation, tool_schemas

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# arguments of the rendering itself, which a client may not set through chat_template_kwargs
_RESERVED = frozenset(
    {
        "chat_template", "tokenize", "tools", "messages", "conversation", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask",
    }
)  # fmt: skip


class ChatTemplate:
    """One compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        self._source = source
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self._structured = reads_parts(environment.parse(source))
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, body: dict[str, Any]) -> str:
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

    def _variables(self, body: dict[str, Any]) -> dict[str, Any]:
        given = body.get("chat_template_kwargs") or {}
        if not isinstance(given, dict) or _RESERVED & given.keys() or body.get("chat_template") is not None:
            raise Unreadable("chat_template_kwargs")
        effort = body.get("reasoning_effort")
        asked: dict[str, Any] = {
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

    @classmethod
    def load(cls, folder: Path, specials: dict[str, str]) -> ChatTemplates:
        """Read tokenizer_config.json, chat_template.jinja, chat_template.json and additional_chat_templates/."""
        config = read_json(folder / "tokenizer_config.json")
        sources: dict[str, str] = {}
        _add(sources, config.get("chat_template"))
        _add(sources, read_json(folder / "chat_template.json").get("chat_template"))
        files = {"default": folder / "chat_template.jinja"}
        files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        sources |= {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
        return cls(sources, specials)

    def choose(self, body: dict[str, Any]) -> ChatTemplate:
        """The template for a request. Raises Unreadable when the model has none."""
        chosen = self._compiled.get("tool_use") if body.get("tools") else None
        chosen = chosen or self._compiled.get("default")
        if chosen is None:
            raise Unreadable("no chat template")
        return chosen


def special_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, as templates see them."""
    found = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_NAMES):
        value = config.get(name, token_map.get(name))
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no file. Raises ValueError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


class _Generation(jinja2.ext.Extension):
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
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
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


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


def flag(body: dict[str, Any], name: str, default: bool) -> bool:
    """A field that is true, false, or not given. Raises Unreadable for anything else."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Unreadable(name)
    return value


def _add(sources: dict[str, str], given: Any) -> None:
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        sources |= {str(entry["name"]): str(entry["template"]) for entry in given}
    elif isinstance(given, dict):
        sources |= {str(name): str(source) for name, source in given.items()}
