"""Why an engine, or one of its requests, does not use the pool: a stable code, and a sentence for people.

Idea: what cannot be shared correctly is computed, and says so. The code is the label of a metric and the first word of
the reason in a request's cache report, from where `mooncache why` has it. No refusal is without a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

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
    NOT_STARTED = "not_started"


_SENTENCES: Final[Mapping[Uncached, str]] = MappingProxyType(
    {
        Uncached.TOKENS: "no keys can be made of its token ids",
        Uncached.MULTIMODAL: "its tokens do not say what its images, sounds or videos are",
        Uncached.PROMPT_EMBEDS: "its prompt has embeddings, which are no tokens",
        Uncached.POOLING: "it generates nothing: its answer is made of the states of all tokens",
        Uncached.STREAMING_INPUT: "its prompt is still growing",
        Uncached.LORA_UNREADABLE: "the files of its adapter cannot be read",
        Uncached.LORA_CHANGED: "the files of its adapter changed after the engine could have read them",
        Uncached.NEW_GENERATION: "the weights changed or the cache was reset while it ran",
        Uncached.DISABLED: "connector.enabled is false",
        Uncached.KV_ROLE: "kv_role must be kv_both",
        Uncached.KV_GROUPS: "the model has several kinds of KV cache",
        Uncached.RECURRENT_STATE: "the model has layers with a recurrent state, of which no block of tokens has a part",
        Uncached.ATTENTION_KIND: "the model's attention is of a kind that the connector does not know",
        Uncached.NOT_CAUSAL: "the KV of a prefix depends on what follows",
        Uncached.KV_SCALES: "the scales of the KV are not known to be in its blocks",
        Uncached.CONTEXT_PARALLEL: "the tokens of a block are spread over several ranks",
        Uncached.WEIGHTS_UNREADABLE: "the weights in memory cannot be read",
        Uncached.MODEL_UNREADABLE: "the model's files cannot be read",
        Uncached.KV_LAYOUT: "the memory of the KV tensors cannot be used",
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
    kinds = sorted({kind for group in groups for kind in _kinds(group.kv_cache_spec)})
    if any("Mamba" in kind for kind in kinds):
        return PoolRefusal(
            Uncached.RECURRENT_STATE,
            f"the model's KV cache is of the kinds {', '.join(kinds)}; of a recurrent state no block of tokens "
            "has a part",
        )
    if len(groups) != 1:
        return PoolRefusal(
            Uncached.KV_GROUPS,
            f"the model has {len(groups)} groups of KV cache ({', '.join(kinds)}); the connector supports models "
            "with one, which --disable-hybrid-kv-cache-manager makes of sliding windows and full attention",
        )
    return _of_spec(groups[0].kv_cache_spec) or _of_settings(config)


def _kinds(spec: Any) -> set[str]:
    """The kinds of a group's layers."""
    return {type(part).__name__ for part in getattr(spec, "kv_cache_specs", {"": spec}).values()}


def _of_spec(spec: Any) -> PoolRefusal | None:
    for part in getattr(spec, "kv_cache_specs", {"": spec}).values():
        kind = type(part).__name__
        if kind not in {"FullAttentionSpec", "MLAAttentionSpec"}:
            return PoolRefusal(
                Uncached.ATTENTION_KIND,
                f"the model's KV cache is of kind {kind}; the connector supports full attention and MLA",
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
