"""What a rank of an engine says of its buffers, and which of them go where between two ranks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mooncache.connectors.sglang.core.parcels import KV, METADATA, Cut, Heads, Piece, head_cut, pieces_of
from mooncache.errors import PassportMismatch

WIRE_VERSION = 1


class RankLayout(msgspec.Struct, frozen=True):
    """Buffers of one rank, as it describes them to its peers."""

    ranks: int
    """Of attention tensor parallelism."""
    rank: int
    page_tokens: int
    latent: bool
    """MLA: each rank has the same KV."""
    heads: int
    """KV heads of the model; 0: not known, or latent."""
    kv_row_bytes: tuple[int, ...]
    kv_layers: tuple[int, ...]
    """The model's number of each buffer's layer; empty: buffers go by their order."""
    state_kinds: tuple[str, ...]
    state_row_bytes: tuple[tuple[int, ...], ...]
    state_layers: tuple[tuple[int, ...], ...]
    metadata_row_bytes: tuple[int, ...]
    version: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Route:
    """From the buffers of one rank to those of another."""

    pairs: dict[int, list[tuple[int, int]]]
    cuts: dict[int, list[Cut]]

    def pieces(self, component: int, *, first: int, rows: int) -> list[Piece]:
        """Rows of a component."""
        return pieces_of(component, self.pairs[component], self.cuts[component], first=first, rows=rows)


def pair_buffers(
    source: Sequence[int], target: Sequence[int], sources: int, targets: int
) -> list[tuple[int, int]]:
    """(number there, number here) of buffers of the same layer; K and V of a layer in the order in which they come.

    Args:
        source, target: layers of the buffers; empty: they go by their order.

    Raises:
        PassportMismatch: a layer is missing, or there are other numbers of buffers without layers.
    """
    if not source or not target:
        if bool(source) != bool(target) or sources != targets:
            raise PassportMismatch(
                f"The engines have {sources} and {targets} buffers, and not both name their layers."
            )
        return [(at, at) for at in range(sources)]
    if len(source) != sources or len(target) != targets:
        raise PassportMismatch("An engine names other numbers of layers than it has buffers.")
    places: dict[int, deque[int]] = {}
    for at, layer in enumerate(target):
        places.setdefault(layer, deque()).append(at)
    found = []
    for at, layer in enumerate(source):
        if not places.get(layer):
            raise PassportMismatch(f"The decode engine has no buffer for layer {layer}.")
        found.append((at, places[layer].popleft()))
    return found


def route(source: RankLayout, target: RankLayout) -> Route:
    """How rows go from a prefill rank to a decode rank.

    Raises:
        PassportMismatch: the engines are too different; the text says in what.
    """
    for name in ("version", "page_tokens", "latent", "state_kinds", "metadata_row_bytes"):
        here, there = getattr(source, name), getattr(target, name)
        if here != there:
            raise PassportMismatch(f"Prefill and decode have different {name}: {here} and {there}.")
    same_size = source.ranks == target.ranks or source.latent
    if not same_size and source.state_kinds:
        kinds = ", ".join(source.state_kinds)
        raise PassportMismatch(
            f"With states ({kinds}) prefill and decode need equal tensor parallelism; they have {source.ranks} and "
            f"{target.ranks} ranks."
        )
    pairs = {
        KV: pair_buffers(
            source.kv_layers, target.kv_layers, len(source.kv_row_bytes), len(target.kv_row_bytes)
        )
    }
    cuts = {KV: _cuts(source, target, pairs[KV], same_size)}
    rows = len(source.metadata_row_bytes)
    pairs[METADATA] = [(at, at) for at in range(rows)]
    cuts[METADATA] = [Cut.whole(each) for each in source.metadata_row_bytes]
    for at, (here, there) in enumerate(zip(source.state_row_bytes, target.state_row_bytes, strict=True)):
        pairs[at] = pair_buffers(source.state_layers[at], target.state_layers[at], len(here), len(there))
        cuts[at] = _whole(here, there, pairs[at])
    return Route(pairs, cuts)


def _cuts(source: RankLayout, target: RankLayout, pairs: list[tuple[int, int]], same_size: bool) -> list[Cut]:
    if same_size:
        return _whole(source.kv_row_bytes, target.kv_row_bytes, pairs)
    if not source.heads:
        raise PassportMismatch("The prefill engine does not say how many KV heads the model has.")
    there = dict(pairs)
    return [
        head_cut(
            Heads(source.ranks, source.rank, source.heads),
            Heads(target.ranks, target.rank, source.heads),
            tokens=source.page_tokens,
            source_row_bytes=row_bytes,
            target_row_bytes=target.kv_row_bytes[there[at]],
        )
        for at, row_bytes in enumerate(source.kv_row_bytes)
    ]


def _whole(here: Sequence[int], there: Sequence[int], pairs: list[tuple[int, int]]) -> list[Cut]:
    for source, target in pairs:
        if here[source] != there[target]:
            raise PassportMismatch(
                f"A row of a buffer has {here[source]} bytes in the prefill engine and {there[target]} in the other."
            )
    return [Cut.whole(each) for each in here]
