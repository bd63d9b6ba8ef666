"""Attention over paged KV, under an unchanged transformers model.

Idea: transformers lets a function be registered that the model calls in place of its own attention. All sequences of a
step lie in one row of tokens; linear layers see them together, and here each gets its own context: new K and V are
written into their blocks, prompts attend one by one, decoding sequences of about the same length attend together.
No result depends on neighbours beyond the rounding of a matrix product, because what is masked weighs exactly 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mooncache.errors import Unsupported
from mooncache.hf_engine.kv_memory import KvMemory, Tensor

NAME = "mooncache_paged"
# Arguments that change the result; passing them over would be silently wrong.
_NOT_DONE = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of one sequence in a step: their blocks, the position of the first one, and how many they are."""

    blocks: Sequence[int]
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Tokens `first` to `last` of the step against the first `length` of their sequence; rows None: all are new."""

    first: int
    last: int
    length: int
    rows: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Decodes:
    """One token of each of several sequences: their places in the step, rows of their contexts, what is masked."""

    places: Tensor
    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that attention has to know about a step; the same for every layer."""

    memory: KvMemory
    block_ids: Tensor
    offsets: Tensor
    prompts: tuple[_Prompt, ...]
    decodes: tuple[_Decodes, ...]


_current = threading.local()


class attending:  # noqa: N801  (used as a statement)
    """`with attending(step): model(...)`: the step that attention on this thread belongs to."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def __enter__(self) -> None:
        _current.step = self._step

    def __exit__(self, *_: object) -> None:
        _current.step = None


def register() -> None:
    """Make the function known to transformers under NAME; harmless when it is."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def make_step(memory: KvMemory, spans: Sequence[TokenSpan]) -> Step:
    """Index tensors of a step, made once for all layers."""
    device, size = memory.device, memory.block_tokens
    block_ids: list[int] = []
    offsets: list[int] = []
    prompts: list[_Prompt] = []
    singles: list[tuple[int, TokenSpan]] = []
    place = 0
    for span in spans:
        for position in range(span.start, span.start + span.count):
            block_ids.append(span.blocks[position // size])
            offsets.append(position % size)
        if span.count == 1:
            singles.append((place, span))
        else:
            prompts.append(_prompt(memory, span, place))
        place += span.count
    return Step(
        memory,
        torch.tensor(block_ids, device=device),
        torch.tensor(offsets, device=device),
        tuple(prompts),
        tuple(_decodes(memory, group) for group in _alike(singles, size)),
    )


def _prompt(memory: KvMemory, span: TokenSpan, place: int) -> _Prompt:
    length = span.start + span.count
    if span.start == 0:
        return _Prompt(place, place + span.count, length, None, None)
    table = torch.tensor(span.blocks[: -(-length // memory.block_tokens)], device=memory.device)
    mask = torch.ones((span.count, length), dtype=torch.bool, device=memory.device).tril(span.start)
    return _Prompt(place, place + span.count, length, memory.rows_of(table), mask)


def _alike(
    singles: Iterable[tuple[int, TokenSpan]], block_tokens: int
) -> Iterable[list[tuple[int, TokenSpan]]]:
    """Groups whose lengths differ by less than a factor of two: padding at most doubles the work."""
    groups: dict[int, list[tuple[int, TokenSpan]]] = {}
    for place, span in singles:
        groups.setdefault((span.start // block_tokens + 1).bit_length(), []).append((place, span))
    return groups.values()


def _decodes(memory: KvMemory, group: Sequence[tuple[int, TokenSpan]]) -> _Decodes:
    used = [span.start // memory.block_tokens + 1 for _, span in group]
    tables = [[*span.blocks[:n], *[0] * (max(used) - n)] for n, (_, span) in zip(used, group, strict=True)]
    lengths = torch.tensor([span.start + 1 for _, span in group], device=memory.device)
    positions = torch.arange(max(used) * memory.block_tokens, device=memory.device)
    return _Decodes(
        torch.tensor([place for place, _ in group], device=memory.device),
        memory.rows_of(torch.tensor(tables, device=memory.device)),
        (positions < lengths[:, None])[:, None, None, :],
    )


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """What transformers calls: `[1, heads, tokens, head size]` in, `[1, tokens, heads, head size]` out.

    Raises:
        Unsupported: the model wants something of attention that is not done here; seen at the first step.
    """
    for name in _NOT_DONE:
        if more.get(name) is not None:
            raise Unsupported(f"The model's attention uses {name}, which this engine does not compute.")
    step: Step = _current.step
    memory, layer = step.memory, module.layer_idx
    memory.write(layer, step.block_ids, step.offsets, key[0].transpose(0, 1), value[0].transpose(0, 1))
    tokens = query[0].transpose(0, 1)
    out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    for prompt in step.prompts:
        part = slice(prompt.first, prompt.last)
        if prompt.rows is None:
            k, v, mask = key[:, :, part], value[:, :, part], None
        else:
            kv = memory.read(layer, prompt.rows).view(2, -1, memory.kv_heads, memory.head_dim)
            k, v = kv[:, : prompt.length].transpose(1, 2).unsqueeze(1).unbind(0)
            mask = prompt.mask
        found = scaled_dot_product_attention(
            query[:, :, part], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        out[part] = found[0].transpose(0, 1)
    for group in step.decodes:
        count = group.places.shape[0]
        kv = memory.read(layer, group.rows).view(2, count, -1, memory.kv_heads, memory.head_dim)
        # The heads that share a KV head are treated as queries of it.
        q = tokens[group.places].view(count, memory.kv_heads, -1, memory.head_dim)
        k, v = kv.transpose(2, 3).unbind(0)
        found = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
        out[group.places] = found.reshape(count, -1, memory.head_dim)
    return out.unsqueeze(0), None
