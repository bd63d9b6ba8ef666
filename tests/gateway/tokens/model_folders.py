"""Tokenizer folders with chat templates of the styles that models use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gateway.tokens.tokenizers_of_all_kinds import KINDS

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = """{{- bos_token }}
{%- if tools is not none and tools is defined %}
    {{- 'Tools: ' + strftime_now('%Y') + ' ' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
    {{- '<|im_start|>' + message['role'] }}{% if message.name %} ({{ message.name }}){% endif %}
    {{- '\n' + message['content'] | trim }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}
    {%- if message.reasoning_content %}R:{{ message.reasoning_content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call | tojson }}{{ call.function.arguments | tojson }}
    {%- endfor %}
    {%- if message.tool_call_id %}{{ message.tool_call_id }}{% endif %}
{%- endfor %}
{%- for document in documents or [] %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {{- document | tojson }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PARTS = """{% set loop_messages = messages %}{% for message in loop_messages %}[{{ message['role'] }}]
{%- if message['content'] is string %}{{ message.content }}{% else %}
{%- for part in message['content'] %}{% if part.type == 'text' %}{{ part.text }}|{% else %}?{% endif %}{% endfor %}
{%- endif %}{{ eos_token }}
{% endfor %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"""
MACRO = """{% macro show(content) %}{% if content is string %}{{ content }}{% else %}
{%- for item in content %}{{ item.text }};{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}{{ m.role }}:{{ show(m.content) }}<|im_end|>{% endfor %}"""
DEVELOPER = CHATML + "{% if messages[0].role == 'developer' %}!{{ messages[0].tools | tojson }}{% endif %}"
TEMPLATES: dict[str, Any] = {
    "chatml": CHATML,
    "tools": TOOLS,
    "parts": PARTS,
    "macro": MACRO,
    "developer": DEVELOPER,
    "named": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}],
}
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
}


def make_folder(folder: Path, template: str, *, kind: str = "llama3", **config: Any) -> Path:
    """Writes a folder as a hub has it; the template is in the configuration, or beside it for plain strings."""
    folder.mkdir(parents=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    source = TEMPLATES[template]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    if template == "tools":
        (folder / "chat_template.jinja").write_text(source)
    else:
        settings["chat_template"] = source
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return folder
