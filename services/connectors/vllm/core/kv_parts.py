"""Parts of a block that engines with other numbers of ranks share: groups of heads, and groups of layers.

Idea: with `connector.head_groups` a block is stored in as many parts as there are groups of heads, whatever the number
of ranks, and each part is described as the block of a rank that has these heads alone. A rank reads and writes the
parts that it holds: one of two ranks holds the first half of them, the only rank of another engine all. A stage of a
pipeline holds the groups of its layers. Where several ranks hold the same heads (fewer heads than ranks, MLA), the
first one writes them and all read them.

The number of a part counts the groups of heads of the first layers first. Jobs for the mover name the parts of one
block next to each other, so that the leading parts that came make the leading blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mooncache.client.keys import split_keys
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached, said
from mooncache.errors import InvalidArgument
from mooncache.kvcache.keys import passport_from_json
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.transfers import LoadReport, SaveReport, TransferJob


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the parts of a rank follow from. Heads are those of keys and values; MLA counts as one head.

    Attributes:
        rank_heads: that the tensors of this rank have.
        layers: names of this rank's layers with KV, in their order.
        layers_total: of all stages.
    """

    heads_total: int
    rank_heads: int
    tp_rank: int
    tp_size: int
    pp_size: int
    layers: tuple[str, ...]
    layers_total: int


@dataclass(frozen=True, slots=True)
class KvPart:
    """One part of each block: `heads` of the rank's tensors from `first_head` on, of these layers."""

    head_group: int
    layer_group: int
    first_head: int
    heads: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts that one rank holds, of `head_groups` * `layer_groups`. `writes`: no rank before it holds them."""

    head_groups: int
    layer_groups: int
    own: tuple[KvPart, ...]
    writes: bool = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the own parts among all parts of a block."""
        return tuple(part.layer_group * self.head_groups + part.head_group for part in self.own)

    @property
    def shares(self) -> int:
        """In how many parts the own layers' heads lie, of all ranks."""
        return self.head_groups * len({part.layer_group for part in self.own})

    def described(self, passport: Passport, part: KvPart) -> Passport:
        """The passport of a part: that of a rank which has no more. `passport` has the part's layout."""
        return replace(
            passport,
            tp_rank=part.head_group,
            tp_size=self.head_groups,
            pp_rank=part.layer_group,
            pp_size=self.layer_groups,
        )

    # --- jobs ------------------------------------------------------------------------------------------------

    def spread(
        self, job: TransferJob, keys: Sequence[bytes], place: Callable[[int, int], int]
    ) -> TransferJob:
        """A job for blocks as one for the own parts of them.

        Args:
            job: its keys do not count.
            keys: of each part of all ranks the packed keys of the job's blocks.
            place: number of a block's part in memory, by the position of the part here and the block; that of the
                first part is the block's own.
        """
        count = len(self.own)
        columns = [split_keys(keys[number]) for number in self.numbers]
        return replace(
            job,
            keys=tuple(key for row in zip(*columns, strict=True) for key in row),
            blocks=tuple(place(at, block) for block in job.blocks for at in range(count)),
            pace=job.pace.in_parts(len(job.blocks), len(job.blocks) * count) if job.pace else None,
            awaited=tuple(block * count + at for block in job.awaited for at in range(count)),
        )

    def loaded(self, report: LoadReport) -> LoadReport:
        """The report of a job of `spread` as one of its blocks. The first part of a block has the block's number."""
        report.loaded //= len(self.own)
        report.blocks = report.blocks[:: len(self.own)]
        return report

    def saved(self, report: SaveReport) -> SaveReport:
        """The same of a save: a block is stored when all its own parts are, and lost when one is."""
        count = len(self.own)
        stored = set(report.stored)
        whole = (at // count for at in report.stored if at % count == 0)
        report.stored = tuple(
            block for block in whole if all(block * count + at in stored for at in range(count))
        )
        report.present = min(report.present // count, len(report.stored))
        report.lost = {reason: -(-parts // count) for reason, parts in report.lost.items()}
        return report


def parts_of_rank(shape: EngineShape, head_groups: int, layer_groups: int) -> RankParts:
    """The parts that a rank holds. There are no more groups of heads than heads.

    Raises:
        InvalidArgument: the heads or layers of this rank are not a whole number of groups.
    """
    groups = min(head_groups, shape.heads_total)
    if shape.heads_total % groups:
        raise InvalidArgument(
            f"The model has {shape.heads_total} heads of keys and values, which do not make {groups} equal groups "
            "(connector.head_groups)."
        )
    width = shape.heads_total // groups
    first, heads, is_first = _heads(shape)
    if heads != shape.rank_heads or heads % width:
        raise InvalidArgument(
            f"A rank of {shape.tp_size} has {shape.rank_heads} heads of keys and values, of {shape.heads_total}; a "
            f"group has {width}: set connector.head_groups to a multiple of the ranks of every engine."
        )
    own = [
        KvPart(head_group, layer_group, head_group * width - first, width, layers)
        for layer_group, layers in _layers(shape, layer_groups)
        for head_group in range(first // width, (first + heads) // width)
    ]
    return RankParts(groups, layer_groups, tuple(own), is_first)


def _heads(shape: EngineShape) -> tuple[int, int, bool]:
    """(first head, number of heads, whether no rank before this one holds them), as vLLM spreads them."""
    more, fewer = max(shape.heads_total, shape.tp_size), min(shape.heads_total, shape.tp_size)
    if more % fewer:
        raise InvalidArgument(f"{shape.heads_total} heads are not spread evenly over {shape.tp_size} ranks.")
    if shape.tp_size <= shape.heads_total:
        each = shape.heads_total // shape.tp_size
        return shape.tp_rank * each, each, True
    copies = shape.tp_size // shape.heads_total
    return shape.tp_rank // copies, 1, shape.tp_rank % copies == 0


def _layers(shape: EngineShape, layer_groups: int) -> list[tuple[int, tuple[str, ...]]]:
    """(group, names of its layers) of each group of layers that this stage holds."""
    if layer_groups == 1 and shape.pp_size == 1:
        return [(0, shape.layers)]
    if shape.layers_total % layer_groups:
        raise InvalidArgument(
            f"The model has {shape.layers_total} layers, which do not make {layer_groups} equal groups "
            "(connector.layer_groups)."
        )
    each = shape.layers_total // layer_groups
    by_group: dict[int, dict[int, str]] = {}
    for name in shape.layers:
        index = _index(name)
        by_group.setdefault(index // each, {})[index] = name
    for group, names in by_group.items():
        if sorted(names) != list(range(group * each, (group + 1) * each)):
            raise InvalidArgument(
                f"A stage of {shape.pp_size} has {len(names)} layers of a group of {each}: set connector.layer_groups "
                "so that every stage of every engine holds whole groups."
            )
    if sum(map(len, by_group.values())) != len(shape.layers):
        raise InvalidArgument("Two layers of this stage have the same number.")
    return [
        (group, tuple(by_group[group][index] for index in sorted(by_group[group])))
        for group in sorted(by_group)
    ]


def _index(name: str) -> int:
    numbers = [int(word) for word in re.split(r"[.]", name) if word.isdigit()]
    if len(numbers) != 1:
        raise InvalidArgument(f"The layer {name} has no number of its own in its name.")
    return numbers[0]


def passports_of(ranks: Sequence[Sequence[str]], *, in_parts: bool) -> list[Passport] | PoolRefusal:
    """All passports by which an engine's keys are made, from those that its ranks say they hold."""
    held = [[passport_from_json(text) for text in texts] for texts in ranks]
    if not in_parts:
        return [passport for passports in held for passport in passports]
    try:
        return joined(held)
    except InvalidArgument as error:
        return PoolRefusal(Uncached.HEAD_GROUPS, said(error))


def weights_named(as_loaded: Sequence[str], now: tuple[str, ...]) -> tuple[str, ...]:
    """Fingerprints of the ranks' memory that belong into keys: none while the files say what the weights are.

    Fingerprints differ with the number of ranks.
    """
    return () if all(as_loaded) and tuple(as_loaded) == now else now


def joined(ranks: Sequence[Sequence[Passport]]) -> list[Passport]:
    """The passports of all parts, in the order of their numbers, from those that each rank holds.

    Raises:
        InvalidArgument: a part that no rank holds, or that two ranks describe differently.
    """
    found: dict[tuple[int, int], Passport] = {}
    for passport in (passport for rank in ranks for passport in rank):
        at = (passport.pp_rank, passport.tp_rank)
        differs = found.setdefault(at, passport).diff(passport)
        if differs:
            raise InvalidArgument(f"Two ranks hold the same heads and describe them differently: {differs}.")
    sizes = {(passport.pp_size, passport.tp_size) for passport in found.values()}
    wanted = [(stage, rank) for stages, ranks_ in sizes for stage in range(stages) for rank in range(ranks_)]
    if len(sizes) != 1 or sorted(found) != wanted:
        raise InvalidArgument(f"The ranks hold {len(found)} of {len(wanted)} parts of a block.")
    return [found[at] for at in wanted]
