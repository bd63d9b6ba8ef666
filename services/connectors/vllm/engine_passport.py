"""The passport of a running vLLM: what its configuration, its model's files and its KV tensors say.

Nothing is typed by hand, and everything that changes the bytes of a block is in it: weights, configuration (all of it
but what is known to be harmless), tokenizer, vLLM's minor version, attention backend, type and order of the KV, block
size and rank. A draft model is in it by its name and settings; its weights are in the fingerprint of memory.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mooncache.connectors.versions import supported_minor
from mooncache.connectors.vllm.core.config_digest import (
    CACHE_HARMLESS,
    LOAD_HARMLESS,
    MODEL_HARMLESS,
    relevant,
    speculation,
)
from mooncache.kvcache import identity
from mooncache.kvcache.memory import LayerLayout
from mooncache.kvcache.passport import Passport

OLDEST: Final = (0, 32, 0)
NEWER_THAN_ALL: Final = (0, 34, 0)


def engine_version() -> str:
    """vLLM's version, for example 0.32.0."""
    import vllm

    version = str(getattr(vllm, "__version__", "") or "")
    if version and version != "dev":
        return version
    return importlib.metadata.version("vllm")


def check_version() -> str:
    """vLLM's minor version, for example 0.32.

    Raises:
        ConfigInvalid: a version whose connector interface is not the one that this connector has.
    """
    return supported_minor("vLLM", engine_version(), oldest=OLDEST, newer_than_all=NEWER_THAN_ALL)


def read_passport(
    config: Any,
    layouts: Mapping[str, LayerLayout],
    dtype: str,
    block_count: int,
    state_dir: Path,
    *,
    block_tokens: int,
    chat_template: str = "",
    groups: str = "",
) -> Passport:
    """The passport of this rank by its files and settings; see `in_memory` for what is in keys.

    Args:
        config: vLLM's VllmConfig.
        layouts: of the KV tensors by layer, in the order in which a block stores them.
        dtype: type of the KV tensors.
        block_tokens: of a block of the pool.
        chat_template: see Settings.
        groups: what `layouts` are a part of, when the engine has several groups of KV or a window.

    Raises:
        MooncacheError: the model's files cannot be read.
    """
    model = config.model_config
    folder = identity.resolve_model(str(model.model), model.revision)
    tokenizer = identity.resolve_model(str(model.tokenizer or model.model), model.tokenizer_revision)
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    settings = {
        "files": identity.config_digest(folder),
        "model": relevant(model, MODEL_HARMLESS),
        "load": relevant(config.load_config, LOAD_HARMLESS),
        "cache": relevant(config.cache_config, CACHE_HARMLESS),
        "speculative": speculation(config.speculative_config),
        **_beside_weights_and_config(model, folder),
    }
    parallel = config.parallel_config
    tp_rank, pp_rank = ranks(config)
    described = [layout.describe(block_count) for layout in layouts.values()]
    return Passport(
        weights_digest=identity.weights_digest(
            folder, state_dir=state_dir, load_format=load_format, seed=int(model.seed or 0)
        ),
        config_digest=identity.digest_of(settings),
        tokenizer_digest=identity.tokenizer_digest(tokenizer, chat_template=chat_template),
        engine=f"vllm-{check_version()}/{attention_backend(config)}",
        kv_dtype=f"{dtype}/{config.cache_config.cache_dtype}",
        kv_layout=f"{len(described)}:" + ",".join(_runs(described)) + (f";{groups}" if groups else ""),
        block_tokens=block_tokens,
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=pp_rank,
        pp_size=parallel.pipeline_parallel_size,
    )


def _beside_weights_and_config(model: Any, folder: Path) -> dict[str, Any]:
    """What else changes the model's KV: a configuration from elsewhere, code that is trusted, the longest prompt.

    LongRoPE has two sets of frequencies; vLLM takes one for the engine's whole life, by its longest prompt.
    """
    found: dict[str, Any] = {}
    if model.hf_config_path and model.hf_config_path != model.model:
        found["config_path"] = identity.config_digest(identity.resolve_model(model.hf_config_path))
    if model.trust_remote_code:
        found["code"] = identity.code_digest(folder)
    text = model.hf_text_config
    ropes = (getattr(text, name, None) for name in ("rope_parameters", "rope_scaling"))
    if any("longrope" in str(rope) for rope in ropes):
        found["longrope_for"] = int(model.max_model_len)
    return found


def ranks(config: Any) -> tuple[int, int]:
    """(tensor parallel rank, pipeline parallel rank) of this worker."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size == 1 and parallel.pipeline_parallel_size == 1:
        return 0, 0
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group, get_pp_group().rank_in_group


def engine_size(config: Any) -> dict[str, int]:
    """Of one copy of the model, as the hand-over file says it: stages, and processes of each. A context that several
    ranks compute has more processes; one that several ranks only keep has not."""
    parallel = config.parallel_config
    context = int(getattr(parallel, "prefill_context_parallel_size", 1))
    return {
        "stages": int(parallel.pipeline_parallel_size),
        "ranks": int(parallel.tensor_parallel_size) * context,
    }


def shard_of(config: Any) -> int:
    """The number of this worker among all of its engine."""
    tp_rank, pp_rank = ranks(config)
    return pp_rank * int(config.parallel_config.tensor_parallel_size) + tp_rank


def attention_backend(config: object) -> str:
    """Names of the attention backends in use; on a CPU with the instruction set that decides how K and V are packed."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    names = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
    name = "+".join(names) or "unknown"
    if name.startswith("CPU"):
        import torch

        sets = [
            flag
            for flag, probe in (("amx", "_is_amx_tile_supported"), ("avx512", "_is_avx512_supported"))
            if getattr(torch.cpu, probe, lambda: False)()
        ]
        name += "-" + "-".join(sets or [os.uname().machine])
    return name


def _runs(words: list[str]) -> list[str]:
    """Equal neighbours once, with their number: 32 equal layers are one word."""
    runs: list[tuple[str, int]] = []
    for word in words:
        if runs and runs[-1][0] == word:
            runs[-1] = (word, runs[-1][1] + 1)
        else:
            runs.append((word, 1))
    return [f"{count}*{word}" for word, count in runs]


def in_memory(passport: Passport, weights: Sequence[str], generation: int = 0) -> Passport:
    """The passport of what lies in memory: files and fingerprints of all shards, so that one that changes changes all.

    Args:
        weights: fingerprints in the order of the ranks.
        generation: how often the cache was reset since the engine had these weights.
    """
    content = [*weights, *([f"generation {generation}"] if generation else [])]
    digest = f"{passport.weights_digest}/{identity.digest_of(content)}"
    return replace(passport, weights_digest=digest)
