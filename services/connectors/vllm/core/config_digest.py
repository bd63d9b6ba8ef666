"""What of vLLM's configuration enters the passport: everything, except what is known to leave the KV as it is.

Idea: a list of fields that matter is behind with every version of vLLM, and then engines with other KV share keys. So
the lists here name what does *not* matter. A field that is not listed splits the cache; it never joins it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Final

# Files and names whose contents are digested where they lie.
_DIGESTED: Final = frozenset({"model", "tokenizer", "revision", "tokenizer_revision", "hf_config_path"})
# Their outcome is hf_config, which is digested as a whole.
_IN_HF_CONFIG: Final = frozenset({"hf_overrides", "config_format", "hf_text_config"})
# From text to tokens, and from logits to an answer. Keys are made from tokens.
_BEFORE_AND_AFTER: Final = frozenset(
    {
        "tokenizer_mode",
        "skip_tokenizer_init",
        "served_model_name",
        "hf_token",
        "allowed_local_media_path",
        "allowed_media_domains",
        "seed",
        "max_logprobs",
        "logprobs_mode",
        "use_fp64_gumbel",
        "return_sampling_mask",
        "enable_trace_replay",
        "logits_processors",
        "generation_config",
        "override_generation_config",
        "pooler_config",
        "io_processor_plugin",
        "renderer_num_workers",
        "enable_prompt_embeds",
    }
)
# How it runs, not what it computes. max_model_len matters to LongRoPE alone (see engine_passport).
_RUNNING: Final = frozenset(
    {
        "enforce_eager",
        "max_model_len",
        "spec_target_max_model_len",
        "disable_cascade_attn",
        "enable_sleep_mode",
        "sleep_preserve_parameter_names",
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
        "enable_nccl_comm_suspend",
        "enable_cumem_allocator",
    }
)
MODEL_HARMLESS: Final = _DIGESTED | _IN_HF_CONFIG | _BEFORE_AND_AFTER | _RUNNING
LOAD_HARMLESS: Final = frozenset(
    {
        "download_dir",
        "safetensors_load_strategy",
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
        "device",
        "use_tqdm_on_load",
        "pt_load_map_location",
    }
)
# Block size and layout have fields of their own in the passport; the others say how much memory there is and how
# blocks are found in it.
CACHE_HARMLESS: Final = frozenset(
    {
        "block_size",
        "user_specified_block_size",
        "_block_size_resolved",
        "effective_attention_block_size",
        "hash_block_size",
        "prefix_match_unit",
        "cache_hit_alignment_tokens",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
        "num_cpu_blocks",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "prefix_cache_retention_interval",
        "kv_offloading_size",
        "kv_offloading_backend",
    }
)
# How many adapters fit, and how they are computed side by side; what each one is, is its content.
LORA_HARMLESS: Final = frozenset(
    {
        "max_lora_rank",
        "max_loras",
        "max_cpu_loras",
        "specialize_active_lora",
        "default_mm_loras",
        "max_lora_cls_labels",
    }
)
# They draft from the tokens that are there already: no layer and no KV is theirs.
_DRAFTS_WITHOUT_MODEL: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
# These say where a configuration comes from, and who wrote it.
_ORIGIN: Final = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})


def relevant(config: Any, harmless: Collection[str]) -> dict[str, Any]:
    """All fields of a configuration as plain data, without the harmless ones."""
    return {
        field.name: plain(getattr(config, field.name, None))
        for field in dataclasses.fields(config)
        if field.name not in harmless
    }


def speculation(config: Any) -> str:
    """What drafting has to do with the KV. A method that is not known here may have layers of its own in a block."""
    return repr(None if config is not None and config.method in _DRAFTS_WITHOUT_MODEL else config)


def plain(value: Any) -> Any:
    """A value as data that JSON can say, equal for equal values in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items() if str(key) not in _ORIGIN}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(part) for part in value]
    for method in ("to_dict", "model_dump"):
        if not isinstance(value, type) and callable(getattr(value, method, None)):
            return plain(getattr(value, method)())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
