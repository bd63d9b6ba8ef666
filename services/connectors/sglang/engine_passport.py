"""The passport of a running SGLang: what its configuration, its model's files and its host pools say.

Nothing is typed by hand. Pages are named by token ids, so the tokenizer does not count. A page's bytes depend on the
weights, the settings that change what is computed, SGLang's minor version, and the type, order and rank of the KV.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mooncache.connectors.sglang.core.pages import Rank
from mooncache.connectors.sglang.core.server_settings import DRAFTS_WITHOUT_MODEL, relevant, takes_media
from mooncache.connectors.sglang.settings import BackendSettings
from mooncache.connectors.versions import supported_minor
from mooncache.errors import ConfigInvalid
from mooncache.kvcache import identity
from mooncache.kvcache.passport import Passport

OLDEST: Final = (0, 5, 23)
NEWER_THAN_ALL: Final = (0, 6, 0)
_NOT_FROM_FILES: Final = frozenset({"remote", "remote_instance"})


def check_version(text: str | None = None) -> str:
    """SGLang's minor version, for example 0.5.

    Raises:
        ConfigInvalid: a version whose storage interface is not the one that this backend has.
    """
    text = importlib.metadata.version("sglang") if text is None else text
    return supported_minor("SGLang", text, oldest=OLDEST, newer_than_all=NEWER_THAN_ALL)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What all pools and ranks of an engine have in common."""

    engine: str
    weights_digest: str
    config_digest: str
    kv_cache_dtype: str
    lora: str


def server_settings() -> tuple[dict[str, Any], Mapping[str, str]]:
    """All settings of this process's engine, as they are in effect, and their namespaces; empty outside of one."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context

    context = get_context()
    try:
        arguments = context.server_args
    except ValueError:
        return {}, {}
    return context.resolved_server_args_dict(), namespace_of(type(arguments))


def read_engine(settings: BackendSettings) -> EngineIdentity:
    """The identity of this process's engine. Reads all weights once for each machine (identity.weights_digest).

    Raises:
        ConfigInvalid: the model's files cannot be read, or its pages cannot be shared.
    """
    version = check_version()
    resolved, namespaces = server_settings()
    model = settings.model_path or str(resolved.get("model_path") or "")
    if not model:
        raise ConfigInvalid(
            'No SGLang engine runs here, so its model is not known: give "mooncache.model_path".'
        )
    load_format = str(resolved.get("load_format") or "auto")
    if load_format in _NOT_FROM_FILES:
        raise ConfigInvalid(
            f"With --load-format {load_format} the weights come from no file of this machine; pages cannot be shared."
        )
    folder = identity.resolve_model(model, resolved.get("revision"))
    if key := takes_media(_config(folder)):
        raise ConfigInvalid(
            f"The model takes images, sounds or videos (config.json has {key}), and tokens do not say which they were: "
            "its pages cannot be shared."
        )
    chosen: dict[str, Any] = {
        "files": identity.config_digest(folder),
        "settings": relevant(resolved, namespaces),
    }
    if resolved.get("trust_remote_code"):
        chosen["code"] = identity.code_digest(folder)
    draft = resolved.get("speculative_draft_model_path")
    if draft and resolved.get("speculative_algorithm") not in DRAFTS_WITHOUT_MODEL:
        path = identity.resolve_model(str(draft), resolved.get("speculative_draft_model_revision"))
        chosen["draft"] = identity.weights_digest(path, state_dir=settings.state_dir)
    return EngineIdentity(
        engine=f"sglang-{version}",
        weights_digest=identity.weights_digest(folder, state_dir=settings.state_dir, load_format=load_format),
        config_digest=identity.digest_of(chosen),
        kv_cache_dtype=str(resolved.get("kv_cache_dtype") or "auto"),
        lora=_adapters(resolved, settings),
    )


def _config(folder: Any) -> Mapping[str, Any]:
    """The model's config.json; config_digest says what is wrong with one that is none."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _adapters(resolved: Mapping[str, Any], settings: BackendSettings) -> str:
    """Contents of the adapters that the engine started with; empty without any.

    SGLang's hashes name those by name and path. Adapters that are loaded later have ids that no other engine has.
    """
    found = []
    for adapter in resolved.get("lora_paths") or ():
        name, path = _name_and_path(adapter)
        folder = identity.resolve_model(path)
        found.append([name, identity.adapter_digest(folder, state_dir=settings.state_dir)])
    return identity.digest_of(sorted(found)) if found else ""


def _name_and_path(adapter: Any) -> tuple[str, str]:
    """Of one of --lora-paths: "path", "name=path", or a record.

    Raises:
        ConfigInvalid: it has no path.
    """
    if isinstance(adapter, str):
        name, equals, path = adapter.partition("=")
        return (name, path) if equals else (adapter, adapter)
    if isinstance(adapter, Mapping) and adapter.get("lora_path"):
        return str(adapter.get("lora_name") or adapter["lora_path"]), str(adapter["lora_path"])
    raise ConfigInvalid(f"The LoRA adapter {adapter!r} has no path, so its content is not known.")


def passport_of(
    facts: EngineIdentity,
    *,
    pool: str,
    layout: str,
    dtype: str,
    page_tokens: int,
    rank: Rank,
    pp: Rank,
    cp: Rank,
) -> Passport:
    """The passport of one shard of one pool's pages.

    Args:
        pool: SGLang's name of the pool (kv, mamba, ...).
        layout: what `PageShape.describe` says.
        cp: attention context parallelism: each of its ranks has a part of every page.
    """
    return Passport(
        weights_digest=facts.weights_digest,
        config_digest=facts.config_digest,
        tokenizer_digest=identity.NO_TOKENIZER,
        engine=facts.engine,
        kv_dtype=f"{dtype}/{facts.kv_cache_dtype}",
        kv_layout=f"{pool}; {layout}" + (f"; part {cp.rank} of {cp.size}" if cp.size > 1 else ""),
        block_tokens=page_tokens,
        tp_rank=rank.rank,
        tp_size=rank.size,
        pp_rank=pp.rank,
        pp_size=pp.size,
        lora=facts.lora,
    )
