"""A rank's KV tensors in the parts that engines with other numbers of ranks share (core/kv_parts.py).

vLLM's tensors are views of [blocks, heads, tokens, content] whatever their order in memory. A part is a narrower view
of the same bytes: its ranges move between the tensors and the pool as those of whole blocks do, without a copy.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mooncache.connectors.vllm.core.config_digest import speculation
from mooncache.connectors.vllm.core.groups import KvGroups, described, parts_of
from mooncache.connectors.vllm.core.kv_parts import EngineShape, KvPart, RankParts, parts_of_rank
from mooncache.connectors.vllm.engine_passport import ranks, read_passport
from mooncache.connectors.vllm.settings import ConnectorSettings
from mooncache.errors import InvalidArgument
from mooncache.kvcache import identity
from mooncache.kvcache.memory import LayerLayout
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.tensors import layout_of

_HEADS = 1
_DIMENSIONS = 4
_TYPES: Final = frozenset({"torch.float32", "torch.float16", "torch.bfloat16"})
_FROM_FILES: Final = frozenset({"auto", "hf", "safetensors", "pt", "mistral"})
"""Loaders of vLLM that take a model's weights from the files of its folder and from nowhere else."""
CHANGE_MARGIN_NS: Final = 2_000_000_000
"""Between the clock of a file system and that of this machine, beside coarse times of files."""


def rank_parts(
    config: Any, cache_config: Any, tensors: Mapping[str, Any], head_groups: int, layer_groups: int
) -> RankParts:
    """The parts that this rank holds.

    Args:
        config: vLLM's VllmConfig.
        cache_config: vLLM's KVCacheConfig.
        tensors: KV tensors by layer, in their order.

    Raises:
        InvalidArgument: its KV cannot be shared with engines that have other numbers of ranks; the text says why.
    """
    if len(cache_config.kv_cache_groups) != 1:
        raise InvalidArgument("connector.head_groups is set, and the model has several groups of KV cache.")
    specs = parts_of(cache_config.kv_cache_groups[0].kv_cache_spec)
    model, parallel = config.model_config, config.parallel_config
    total = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    heads = {_heads_of(spec, is_mla=bool(model.use_mla)) for spec in specs}
    if len(heads) != 1:
        raise InvalidArgument("connector.head_groups is set, and the layers have different numbers of heads.")
    (rank_heads,) = heads
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if str(tensor.dtype) not in _TYPES:
            raise InvalidArgument(
                f"connector.head_groups is set, and the KV has the type {tensor.dtype}: its scales need not be the "
                "same for another number of ranks."
            )
        if len(shape) != _DIMENSIONS or shape[_HEADS] != rank_heads:
            raise InvalidArgument(f"connector.head_groups is set, and {name} is a tensor of shape {shape}.")
    tp_rank, _ = ranks(config)
    return parts_of_rank(
        EngineShape(
            total,
            rank_heads,
            tp_rank,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            tuple(tensors),
            int(model.get_total_num_hidden_layers()),
        ),
        head_groups,
        layer_groups,
    )


def _heads_of(spec: Any, *, is_mla: bool) -> int:
    slots, heads = getattr(spec, "num_head_slots", None), int(spec.num_kv_heads)
    packed = getattr(spec, "state_content_bytes", None) is not None and not is_mla
    if packed or (slots is not None and slots != heads):
        raise InvalidArgument("connector.head_groups is set, and the KV of several heads is packed together.")
    return heads


def tensors_of(part: KvPart, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a part: views of its heads."""
    return {name: tensors[name].narrow(_HEADS, part.first_head, part.heads) for name in part.layers}


def part_layout(tensor: Any) -> LayerLayout:
    """The layout of a part. Of one head it is the same whether heads lay behind tokens or before them."""
    layout = layout_of(tensor)
    if layout.shape[_HEADS] != 1:
        return layout
    strides = list(layout.strides)
    strides[_HEADS] = strides[0]
    return LayerLayout(layout.shape, tuple(strides), layout.item_bytes)


def why_not_of_files(config: Any) -> str:
    """Why the weights in memory need not be those of the model's files; "" when they are, until they change.

    Fingerprints of memory differ with the number of ranks. So engines of different numbers share only while the files
    alone say what the weights are.

    Raises:
        ConfigInvalid: the files cannot be read.
    """
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    if load_format not in _FROM_FILES:
        return f"load_format is {load_format}"
    if speculation(config.speculative_config) != speculation(None):
        return "a draft model has weights of its own"
    folder = identity.resolve_model(str(config.model_config.model), config.model_config.revision)
    if identity.weights_changed_ns(folder) + CHANGE_MARGIN_NS > _process_started_ns():
        return "the model's files changed after this process began"
    return ""


def _process_started_ns() -> int:
    """Wall clock of the beginning of this process, which has read no weights before."""
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    ticks = int(text.rsplit(")", 1)[1].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    return time.time_ns() - age_ns


def read_passports(
    config: Any,
    settings: ConnectorSettings,
    block_count: int,
    by_group: Sequence[Mapping[str, Any]],
    groups: KvGroups,
    parts: RankParts | None,
) -> list[Passport]:
    """Of each group of KV cache, or of each part. Raises MooncacheError: the model's files cannot be read."""
    layout = layout_of if parts is None else part_layout
    of_groups = by_group if parts is not None else [by_group[member] for member in groups.members]
    found = [
        read_passport(
            config,
            {name: layout(tensor) for name, tensor in tensors.items()},
            str(next(iter(tensors.values())).dtype).removeprefix("torch."),
            block_count,
            settings.state_dir,
            block_tokens=groups.block_tokens,
            chat_template=settings.chat_template,
            groups=described(group, by_group, groups),
        )
        for group, tensors in enumerate(of_groups)
    ]
    if parts is None:
        return found
    return [parts.described(passport, part) for passport, part in zip(found, parts.own, strict=True)]


def by_group_of(cache_config: Any, groups: KvGroups, tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tensors of each group's layers, in the order in which a block stores them. Groups may share memory.

    Raises:
        InvalidArgument: no layer of a group is in this worker.
    """
    if len(groups) == 1:
        return [in_order(tensors)]
    found = []
    for group in cache_config.kv_cache_groups:
        own = {name: tensors[name] for name in group.layer_names if name in tensors}
        if not own:
            raise InvalidArgument("this worker has no layer of one of the groups of KV cache")
        found.append(in_order(own))
    return found


def in_order(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Layers by name, numbers as numbers; layers that share the KV of another one are left out."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name in sorted(tensors, key=lambda text: [_word(part) for part in re.split(r"(\d+)", text)]):
        address = tensors[name].data_ptr()
        if address not in seen:
            seen.add(address)
            found[name] = tensors[name]
    return found


def _word(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
