"""A tokenizer and its chat templates from their folder: the same ones that transformers gives the engine.

tokenizer.json says it all when tokenizer_config.json names a generic class. Some classes build another tokenizer from
the same vocabulary; then transformers, where it is installed, is asked in a process of its own, because importing it
costs this process seconds and hundreds of megabytes. Without it tokenizer.json is taken as it is.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mooncache.gateway.tokens.template import ChatTemplates

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_GENERIC_CLASSES = frozenset(["PreTrainedTokenizerFast", "TokenizersBackend"])
_EXPORT_MODULE = "mooncache.gateway.tokens.export"
_EXPORT_TIMEOUT_S = 120.0
_TOKEN_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(folder: Path) -> tuple[Tokenizer, dict[str, str]] | None:
    """The tokenizer of a model folder and its special tokens by name; None when there is no tokenizer.json.

    Raises:
        ValueError: broken files, or transformers could not load the folder.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    config = read_json(folder / "tokenizer_config.json")
    if config.get("tokenizer_class") not in _GENERIC_CLASSES and importlib.util.find_spec("transformers"):
        tokenizer, specials = _exported(folder)
    else:
        tokenizer = _parsed(path.read_text(encoding="utf-8"), path)
        specials = special_tokens(config, read_json(folder / "special_tokens_map.json"))
        _add_missing_tokens(tokenizer, config, specials)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return tokenizer, specials


def load_templates(folder: Path, specials: dict[str, str]) -> ChatTemplates:
    """Read tokenizer_config.json, chat_template.jinja, chat_template.json and additional_chat_templates/."""
    config = read_json(folder / "tokenizer_config.json")
    sources: dict[str, str] = {}
    _add(sources, config.get("chat_template"))
    _add(sources, read_json(folder / "chat_template.json").get("chat_template"))
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    sources |= {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    return ChatTemplates(sources, specials)


def special_tokens(config: dict[str, object], token_map: dict[str, object]) -> dict[str, str]:
    """bos_token, eos_token and so on, as templates see them."""
    found = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_NAMES):
        value = config.get(name, token_map.get(name))
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def read_json(path: Path) -> dict[str, object]:
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


def _parsed(text: str, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ValueError(f"{path} cannot be read: {error!s:.200}") from None


def _exported(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", _EXPORT_MODULE, str(folder)],
            capture_output=True,
            timeout=_EXPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"transformers did not load {folder} within {_EXPORT_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()[-300:]
        raise ValueError(f"transformers cannot load {folder}: {reason}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return _parsed(answer["tokenizer"], folder), answer["special_tokens"]


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], specials: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0]))
    for _, fields in declared:
        if fields["content"] not in known:
            settings = {name: fields[name] for name in _TOKEN_FIELDS if name in fields}
            tokenizer.add_tokens([AddedToken(fields["content"], **settings)])
            known.add(fields["content"])
    for content in specials.values():
        if content not in known:
            tokenizer.add_special_tokens([AddedToken(content, special=True)])
            known.add(content)


def _add(sources: dict[str, str], given: object) -> None:
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        sources |= {str(entry["name"]): str(entry["template"]) for entry in given}
    elif isinstance(given, dict):
        sources |= {str(name): str(source) for name, source in given.items()}
