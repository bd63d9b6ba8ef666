"""What of SGLang's configuration enters the passport: the namespaces about what is computed, except harmless fields.

Idea: a list of fields that matter is behind with every version of SGLang, and then engines with other KV share keys. So
the lists here name what does *not* matter: whole namespaces (network, scheduling, logs), and fields of the others. What
is not listed splits the cache; it never joins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# How requests come in and go out, which request runs when, where memory is and how much there is. Ranks have fields of
# their own in the passport, and LoRA adapters are digested by content.
NAMESPACES_HARMLESS: Final = frozenset(
    {
        "device",
        "disagg",
        "exec.comm",
        "exec.graph",
        "exec.offload",
        "exec.overlap",
        "lora",
        "memory",
        "mm",
        "observability",
        "parallel",
        "schedule",
        "serving",
    }
)
FIELDS_HARMLESS: Final = frozenset(
    {
        # Files and names whose contents are digested where they lie.
        "model_path",
        "revision",
        "download_dir",
        # How the files are read.
        "weight_loader_disable_mmap",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load",
        "model_checksum",
        "engine_info_bootstrap_port",
        # After the KV: logits, sampling, answers.
        "grammar_backend",
        "sampling_backend",
        "sampling_mask_max_tokens",
        "enable_custom_logit_processor",
        "disable_outlines_disk_cache",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
        "enable_draft_weights_cpu_backup",
        "enable_return_routed_experts",
        "expert_distribution_recorder_mode",
        "expert_distribution_recorder_buffer_size",
        "expert_balancedness_report_mode",
        "mooncake_ib_device",
        "spec_trace_dir",
    }
)
# Drafts from the tokens that are there already: no layer and no KV is theirs.
DRAFTS_WITHOUT_MODEL: Final = frozenset({"NGRAM"})
_DRAFT_NAMESPACE: Final = "spec"
_MEDIA_WORDS: Final = ("vision", "visual", "audio", "image", "video")


def relevant(resolved: Mapping[str, Any], namespaces: Mapping[str, str]) -> dict[str, str]:
    """The settings that may change the KV, as text.

    Args:
        resolved: all settings as they are in effect.
        namespaces: namespace of each setting that a user can give; others are derived from those.
    """
    draftless = resolved.get("speculative_algorithm") in (None, *DRAFTS_WITHOUT_MODEL)
    skipped = NAMESPACES_HARMLESS | ({_DRAFT_NAMESPACE} if draftless else frozenset())
    return {
        name: repr(value)
        for name, value in sorted(resolved.items())
        if name in namespaces and namespaces[name] not in skipped and name not in FIELDS_HARMLESS
    }


def takes_media(config: Mapping[str, Any]) -> str:
    """The key of a model's config.json by which it takes images, sounds or videos; empty when it does not."""
    return next((key for key in config if any(word in key for word in _MEDIA_WORDS)), "")
