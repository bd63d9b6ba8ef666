"""What an engine says about itself: the passport file that it writes, and what can be read without one.

Both are text from another process: fields of the wrong type count as not said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mooncache.errors import InvalidArgument
from mooncache.kvcache.keys import passport_from_json
from mooncache.kvcache.passport import Passport

FILE_BYTES_MAX: Final = 1 << 20
_NUMBER_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of one engine run; 0, "" and None mean "not known"."""

    passport: Passport | None = None
    kv_bytes_per_token: int = 0
    kv_capacity_tokens: int = 0
    block_tokens: int = 0
    max_model_tokens: int = 0
    max_sequences: int = 0
    engine_version: str = ""
    pool: bool = False
    stages: int = 0
    """Of its pipeline."""
    ranks: int = 0
    """Processes of each stage."""
    replicas: int = 0
    """Data parallel copies of the model."""


def facts_from_file(text: str) -> EngineFacts:
    """Facts from the file that the engine's side of the pool writes.

    Raises:
        InvalidArgument: it is not such a file.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the passport file is not JSON: {error!r:.200}") from None
    if not isinstance(content, dict):
        raise InvalidArgument("the passport file does not hold a JSON object")
    passport = passport_from_json(json.dumps(content.get("passport")))
    version = content.get("engine_version")
    return EngineFacts(
        passport=passport,
        kv_bytes_per_token=number(content, "kv_bytes_per_token"),
        kv_capacity_tokens=number(content, "kv_capacity_tokens"),
        block_tokens=passport.block_tokens,
        max_model_tokens=number(content, "max_model_tokens"),
        max_sequences=number(content, "max_sequences"),
        engine_version=version[:128] if isinstance(version, str) else "",
        pool=content.get("pool") is True,
        stages=number(content, "stages"),
        ranks=number(content, "ranks"),
    )


def facts_from_http(models: object, version: object, cache_config: Mapping[str, str]) -> EngineFacts:
    """Facts from GET /v1/models, GET /version and the labels of vLLM's cache_config_info."""
    first = _first_model(models)
    found = version.get("version") if isinstance(version, dict) else ""
    block = digits(cache_config.get("block_size"))
    return EngineFacts(
        block_tokens=block,
        kv_capacity_tokens=block * digits(cache_config.get("num_gpu_blocks")),
        max_model_tokens=number(first, "max_model_len"),
        engine_version=found[:128] if isinstance(found, str) else "",
    )


def facts_from_server_info(models: object, info: object) -> EngineFacts:
    """Facts from GET /v1/models and from SGLang's GET /server_info."""
    found = info.get("version") if isinstance(info, dict) else ""
    # With attention that is data parallel the ranks of one model divide the requests: there is no second copy.
    divided = isinstance(info, dict) and info.get("enable_dp_attention") is True
    return EngineFacts(
        block_tokens=number(info, "page_size"),
        kv_capacity_tokens=number(info, "max_total_num_tokens"),
        max_model_tokens=number(_first_model(models), "max_model_len") or number(info, "context_length"),
        max_sequences=number(info, "max_running_requests"),
        engine_version=found[:128] if isinstance(found, str) else "",
        stages=number(info, "pp_size"),
        ranks=number(info, "tp_size"),
        replicas=min(1, number(info, "tp_size")) if divided else number(info, "dp_size"),
    )


def merged(first: EngineFacts, second: EngineFacts) -> EngineFacts:
    """What the first says, and what only the second says."""
    fields = EngineFacts.__dataclass_fields__
    return EngineFacts(**{name: getattr(first, name) or getattr(second, name) for name in fields})


def model_of(models: object) -> tuple[str, str]:
    """(name for clients, folder or id) of the first served model; "" when there is none."""
    first = _first_model(models)
    name, root = first.get("id"), first.get("root")
    return (name if isinstance(name, str) else "", root if isinstance(root, str) else "")


def number(content: object, name: str) -> int:
    """A number that is not negative; 0 for anything else."""
    value = content.get(name) if isinstance(content, dict) else None
    return value if type(value) is int and 0 <= value <= _NUMBER_MAX else 0


def digits(text: str | None) -> int:
    """A number of up to 15 digits; 0 for any other text."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 16 else 0


def _first_model(models: object) -> dict[str, object]:
    data = models.get("data") if isinstance(models, dict) else None
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
