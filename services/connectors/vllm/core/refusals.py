"""Why an engine, or one of its requests, does not use the pool: a stable code, and a sentence for people.

Idea: what cannot be shared correctly is computed, and says so. The code is the label of a metric and the first word of
the reason in a request's cache report, from where `mooncache why` has it. No refusal is without a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from mooncache.connectors.vllm.core.groups import columns_of, is_state, parts_of

_WINDOW: Final = "SlidingWindowSpec"
COLUMNS_MAX: Final = 64
"""Blocks of all groups between two borders: each has a key of its own, and is asked for."""
REASON_CHARS_MAX: Final = 256
"""Of a cache report's reason; longer ones are not taken (kvcache/leg_hint.py)."""


class Uncached(StrEnum):
    """Why a request does not use the pool. They are labels of metrics."""

    NO = ""  # it uses the pool
    # the request
    TOKENS = "tokens"
    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    POOLING = "pooling"
    STREAMING_INPUT = "streaming_input"
    LORA_UNREADABLE = "lora_unreadable"
    LORA_CHANGED = "lora_changed"
    NEW_GENERATION = "new_generation"
    # the engine
    DISABLED = "disabled"
    KV_ROLE = "kv_role"
    KV_GROUPS = "kv_groups"
    RECURRENT_STATE = "recurrent_state"
    ATTENTION_KIND = "attention_kind"
    NOT_CAUSAL = "not_causal"
    KV_SCALES = "kv_scales"
    CONTEXT_PARALLEL = "context_parallel"
    WEIGHTS_UNREADABLE = "weights_unreadable"
    MODEL_UNREADABLE = "model_unreadable"
    KV_LAYOUT = "kv_layout"
    HEAD_GROUPS = "head_groups"
    NOT_STARTED = "not_started"


_SENTENCES: Final[Mapping[Uncached, str]] = MappingProxyType(
    {
        Uncached.TOKENS: "no keys can be made of its token ids",
        Uncached.MULTIMODAL: "what its images, sounds or videos are cannot be said",
        Uncached.PROMPT_EMBEDS: "its prompt has embeddings, which are no tokens",
        Uncached.POOLING: "it generates nothing: its answer is made of the states of all tokens",
        Uncached.STREAMING_INPUT: "its prompt is still growing",
        Uncached.LORA_UNREADABLE: "the files of its adapter cannot be read",
        Uncached.LORA_CHANGED: "the files of its adapter changed after the engine could have read them",
        Uncached.NEW_GENERATION: "the weights changed or the cache was reset while it ran",
        Uncached.DISABLED: "connector.enabled is false",
        Uncached.KV_ROLE: "kv_role must be kv_both",
        Uncached.KV_GROUPS: "the model has groups of KV cache that are not shared together",
        Uncached.RECURRENT_STATE: "the engine does not keep its layers' recurrent states at the borders of blocks",
        Uncached.ATTENTION_KIND: "the model's attention is of a kind that the connector does not know",
        Uncached.NOT_CAUSAL: "the KV of a prefix depends on what follows",
        Uncached.KV_SCALES: "the scales of the KV are not known to be in its blocks",
        Uncached.CONTEXT_PARALLEL: "the tokens of a block are spread over several ranks",
        Uncached.WEIGHTS_UNREADABLE: "the weights in memory cannot be read",
        Uncached.MODEL_UNREADABLE: "the model's files cannot be read",
        Uncached.KV_LAYOUT: "the memory of the KV tensors cannot be used",
        Uncached.HEAD_GROUPS: "its KV cannot be shared with engines that have other numbers of ranks",
        Uncached.NOT_STARTED: "the engine's workers did not say what their KV is; their log says why",
    }
)


@dataclass(frozen=True, slots=True)
class PoolRefusal:
    """The pool is not used, and why. Without a `text` the sentence is that of the code."""

    code: Uncached
    text: str = ""

    def __post_init__(self) -> None:
        if not self.text.strip():
            object.__setattr__(self, "text", _SENTENCES[self.code])

    def __str__(self) -> str:
        """As it stands in reports: code and sentence."""
        return f"{self.code}: {self.text}"[:REASON_CHARS_MAX]


def said(error: BaseException) -> str:
    """What an error says; never empty."""
    return str(error).strip() or repr(error)


def of_engine(*, enabled: bool, config: Any, cache_config: Any) -> PoolRefusal | None:
    """Why an engine cannot use the pool, by its configuration; None when it can.

    Args:
        enabled: the setting `connector.enabled`.
        config: vLLM's VllmConfig.
        cache_config: vLLM's KVCacheConfig.
    """
    if not enabled:
        return PoolRefusal(Uncached.DISABLED)
    if not config.kv_transfer_config.is_kv_consumer:
        # vLLM keeps freed blocks back from steps that still write them only for engines that say they load.
        role = config.kv_transfer_config.kv_role
        return PoolRefusal(Uncached.KV_ROLE, f"kv_role is {role}; it must be kv_both")
    groups = cache_config.kv_cache_groups
    kinds = sorted({type(part).__name__ for group in groups for part in parts_of(group.kv_cache_spec)})
    specs = (_of_spec(group.kv_cache_spec) for group in groups)
    refusal = next(filter(None, specs), None) or _of_states(cache_config, kinds)
    if refusal is None and (len(groups) != 1 or _WINDOW in kinds):
        refusal = _of_groups(groups, config.cache_config.block_size, kinds)
    return refusal or _of_settings(config)


def _of_states(cache_config: Any, kinds: Sequence[str]) -> PoolRefusal | None:
    """Why recurrent states cannot be shared: each has to be that behind a whole number of blocks, and to stay so."""
    groups = [group.kv_cache_spec for group in cache_config.kv_cache_groups]
    for spec in filter(is_state, groups):
        unit = getattr(cache_config, "hash_block_size", None) or spec.block_size
        if spec.mamba_cache_mode != "align":
            why = (
                f"mamba_cache_mode is {spec.mamba_cache_mode}, by which no state is kept at a border of blocks "
                "(prefix caching is off, or vLLM cannot keep them for this model)"
            )
        elif spec.num_speculative_blocks:
            why = "tokens of drafts pass through them, and are taken back"
        elif unit != spec.block_size:
            why = f"they are kept every {unit} tokens, and not every {spec.block_size}, which is a block"
        else:
            continue
        return PoolRefusal(
            Uncached.RECURRENT_STATE,
            f"the model's KV cache is of the kinds {', '.join(kinds)}; of its recurrent states: {why}",
        )
    return None


def _of_groups(groups: Sequence[Any], block_tokens: int, kinds: Sequence[str]) -> PoolRefusal | None:
    """Why groups, or a window, cannot be shared: borders of all groups have to come often enough, and all that is
    needed there has to lie in blocks that are saved."""
    sizes = [group.kv_cache_spec.block_size for group in groups]
    named = f"with blocks of {', '.join(map(str, sorted(set(sizes))))} tokens"
    if len(sizes) == 1 and sizes != [block_tokens]:
        why = f"{named}, and not of {block_tokens}"
    elif len(set(sizes)) > 1 and any(is_state(group.kv_cache_spec) for group in groups):
        why = f"{named}, and recurrent states"
    elif (columns := len(columns_of(sizes))) > COLUMNS_MAX:
        why = f"{named}, which end together every {math.lcm(*sizes)} tokens only: {columns} of them lie in between"
    elif any(group.is_eagle_group for group in groups):
        why = "of which one has layers of a draft model that looks ahead"
    elif any(not group.enable_kv_transfer or group.host_resident for group in groups):
        why = "of which one is not in the engine's own KV memory, or not to be transferred"
    else:
        return None
    return PoolRefusal(
        Uncached.KV_GROUPS,
        f"the model has {len(groups)} groups of KV cache ({', '.join(kinds)}), {why}; "
        "--disable-hybrid-kv-cache-manager makes one group of sliding windows and full attention",
    )


def _of_spec(spec: Any) -> PoolRefusal | None:
    parts = parts_of(spec)
    for part in parts:
        kind = type(part).__name__
        # vLLM manages layers of different windows, or sizes, as one group only if it need not know of the windows.
        alone = (kind == _WINDOW or is_state(part)) and part is spec
        if kind not in {"FullAttentionSpec", "MLAAttentionSpec"} and not alone:
            return PoolRefusal(
                Uncached.ATTENTION_KIND,
                f"the model's KV cache is of kind {kind}; the connector supports full attention, MLA, and sliding "
                "windows or recurrent states of equal layers",
            )
        if getattr(part, "non_causal", False):
            return PoolRefusal(
                Uncached.NOT_CAUSAL,
                "the model's attention is not causal: the KV of a prefix depends on what follows",
            )
    return None


def _of_settings(config: Any) -> PoolRefusal | None:
    kv_type = str(config.cache_config.cache_dtype)
    if kv_type.endswith("_per_token_head"):
        return PoolRefusal(
            Uncached.KV_SCALES,
            f"the KV type {kv_type} has a scale for each token, which is not known to be in a block's bytes",
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return PoolRefusal(
            Uncached.KV_SCALES,
            "calculate_kv_scales is set: the KV's scales depend on the engine's first step",
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(config.parallel_config, name, 1)
        if size > 1:
            return PoolRefusal(Uncached.CONTEXT_PARALLEL, f"{name} is {size}; the connector supports only 1")
    return None
