"""A tokenizer from its folder, with the same settings that transformers' AutoTokenizer gives it.

tokenizer.json is the tokenizer; tokenizer_config.json may still add tokens and switch the begin and end tokens on or
off. Truncation and padding belong to requests, so what the file says about them is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from mooncache.gateway.tokens.template import read_json, special_tokens

_TOKEN_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder, None when there is no tokenizer.json. Raises ValueError for a broken one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ValueError(f"{path} cannot be read: {error!s:.200}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    specials = special_tokens(config, read_json(folder / "special_tokens_map.json"))
    _add_missing_tokens(tokenizer, config, specials)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    if "add_bos_token" in config or "add_eos_token" in config or tokenizer.post_processor is None:
        _set_ends(tokenizer, config, specials)
    return tokenizer


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], specials: dict[str, str]) -> None:
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


def _set_ends(tokenizer: Tokenizer, config: dict[str, Any], specials: dict[str, str]) -> None:
    """Begin and end tokens exactly as the configuration asks."""
    template, used = ["$A:0"], []
    bos, eos = specials.get("bos_token"), specials.get("eos_token")
    if config.get("add_bos_token") and bos is not None:
        template.insert(0, f"{bos}:0")
        used.append((bos, tokenizer.token_to_id(bos)))
    if config.get("add_eos_token") and eos is not None:
        template.append(f"{eos}:0")
        used.append((eos, tokenizer.token_to_id(eos)))
    tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(template), special_tokens=used)
