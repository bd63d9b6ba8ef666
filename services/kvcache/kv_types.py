"""Types of KV with which an engine starts, and answers garbage without a word."""

from __future__ import annotations

from typing import Final

# vLLM's backend for CPUs has these, whatever the model's type is. It checks nothing and takes others too.
_CPU_TYPES: Final = frozenset({"", "auto", "fp8", "fp8_e4m3", "fp8_e5m2"})
_SHORT: Final = {"half": "float16", "float": "float32"}


def why_garbage(kv_type: str, model_type: str, *, cpu: bool) -> str:
    """Why vLLM's answers would make no sense; "" when nothing is known against it.

    Args:
        kv_type: as --kv-cache-dtype.
        model_type: as --dtype; "auto" where it is not known yet.
        cpu: vLLM runs on a CPU.
    """
    model_type = model_type.removeprefix("torch.")
    model_type = _SHORT.get(model_type, model_type)
    if not cpu or kv_type in _CPU_TYPES or kv_type == model_type:
        return ""
    if kv_type in {"float16", "bfloat16"}:
        if model_type in {"", "auto"}:
            return ""
        return (
            f"On a CPU vLLM answers garbage with KV of type {kv_type} under a model of type {model_type}: "
            "take --kv-cache-dtype auto."
        )
    return f"On a CPU vLLM answers garbage with KV of type {kv_type}: take --kv-cache-dtype auto or fp8."
