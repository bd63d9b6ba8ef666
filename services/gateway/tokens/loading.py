"""A tokenizer from its folder, the same one that transformers' AutoTokenizer gives the engine.

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

from mooncache.gateway.tokens.template import read_json, special_tokens

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
