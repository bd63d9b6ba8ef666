"""The statistical model of one configuration: which requests it serves within the SLOs, and what limits it.

Per request it knows only the way (queue, fetch, compute, batch), never a decision; the simulator, which runs the real
policies, has the last word on finalists. Results are kept per part, so that a search pays for each queue once.

A conductor refuses what it could not serve in time, so an overloaded cluster still serves part of the requests. Here
that is a share of them, the same at all times, chosen to leave as many as possible within the SLOs: of every share
the requests that are let in are among those of every larger share, which keeps the model monotone.

Invariant (the search relies on it): a configuration with more machines of a role, with a larger pool or a faster
network serves every request that it served before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mooncache.plan.core import decode as decoding
from mooncache.plan.core import prefill as prefilling
from mooncache.plan.core.machine import Floats, InstanceType
from mooncache.plan.core.reuse import ReuseDistances
from mooncache.plan.core.spec import GB, Arrangement, SloSpec
from mooncache.prices.core.hardware import Dram, Nic, Ssd

Bools = NDArray[np.bool_]
Rows = NDArray[np.intp]
ADMITTED: Final = (1.0, 0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)  # shares that may be let in
_GOLDEN: Final = 0.6180339887498949
LEVELS_PER_DOUBLING: Final = 4  # pool sizes are rounded down to these steps: 19 % apart


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload as columns; row i is one request, arrivals ascending."""

    arrival_s: Floats
    input_tokens: Floats
    output_tokens: Floats
    reuse: ReuseDistances

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Time from the first arrival to the end of the last request's share of it."""
        between = float(self.arrival_s[-1] - self.arrival_s[0])
        return max(between * len(self) / max(len(self) - 1, 1), 1e-9)

    @property
    def rate_per_s(self) -> float:
        """Requests per second."""
        return len(self) / self.span_s

    def faster(self, factor: float) -> Demand:
        """The same requests, arriving `factor` times as fast."""
        return Demand(self.arrival_s / factor, self.input_tokens, self.output_tokens, self.reuse)


@dataclass(frozen=True, slots=True)
class Layout:
    """One configuration: machines of each role, what an instance is, and what every machine is given."""

    prefill: InstanceType
    decode: InstanceType
    prefill_nodes: int
    decode_nodes: int
    stages: int
    dram: Dram
    ssd: Ssd
    nic: Nic
    arrangement: Arrangement = Arrangement.FIXED

    @property
    def prefill_instances(self) -> int:
        """Prefill instances."""
        return self.prefill_nodes * self.prefill.per_node

    @property
    def decode_instances(self) -> int:
        """Decode instances."""
        return self.decode_nodes * self.decode.per_node

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.prefill_nodes + self.decode_nodes

    @property
    def name(self) -> str:
        """Such as "8P (A800 x8) + 4D (A800 x8), 1000 GB DRAM, 800 Gbit/s"."""
        roles = (
            f"{self.prefill_instances}P ({self.prefill.name}) + {self.decode_instances}D ({self.decode.name})"
        )
        if self.arrangement is Arrangement.BOTH:
            roles = f"{self.prefill_instances + self.decode_instances} of both roles ({self.prefill.name})"
        elif self.arrangement is Arrangement.SWITCHING:
            roles += ", roles follow the load"
        parts = [roles, f"{self.dram.gb:g} GB DRAM"]
        if self.ssd.gb:
            parts.append(f"{self.ssd.gb:g} GB SSD")
        parts.append(f"{self.nic.gbps:g} Gbit/s")
        if self.stages > 1:
            parts.append(f"pipelines of {self.stages}")
        return ", ".join(parts)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it this configuration and no other; sortable."""
        return (
            self.prefill.name,
            self.prefill_nodes,
            self.decode.name,
            self.decode_nodes,
            self.stages,
            self.dram.gb,
            self.ssd.gb,
            self.nic.gbps,
            self.arrangement,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFigures:
    """What model and simulator both say of a layout. Shares are of all requests, times of those that are let in.

    *_at_target_s: the quantile over all requests at the share that is wanted, refused ones being infinitely late.
    """

    attainment: float
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_at_target_s: float
    tbt_mean_s: float
    tbt_p90_s: float
    tbt_at_target_s: float
    hit_ratio: float
    goodput_per_s: float


class Bottleneck(StrEnum):
    """What keeps requests outside of the SLOs."""

    CAPACITY = "capacity"
    TTFT = "TTFT"
    TBT = "TBT"
    KV_MEMORY = "KV memory"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(LayoutFigures):
    """What the statistical model expects of a layout; loads are mean use, 1 is all."""

    admitted: float
    ttft_met: float
    tbt_met: float
    kv_fits: float
    ttft_p50_s: float
    compute_load: float
    network_load: float
    disk_load: float
    kv_load_max: float
    sequences_mean: float

    @property
    def overloaded(self) -> bool:
        """Whether requests have to be refused: there the model, which refuses evenly, can be far off."""
        return self.admitted < 1

    @property
    def binding(self) -> Bottleneck:
        """The limit that most of the requests outside of the SLOs ran into."""
        if self.overloaded:
            return Bottleneck.CAPACITY
        lost = {
            Bottleneck.TTFT: 1 - self.ttft_met,
            Bottleneck.TBT: 1 - self.tbt_met,
            Bottleneck.KV_MEMORY: 1 - self.kv_fits,
        }
        worst = max(lost, key=lambda limit: lost[limit])
        return worst if lost[worst] > 0 else Bottleneck.NONE


class Estimator:
    """The statistical model over one workload; remembers queues and batches."""

    def __init__(self, demand: Demand, slo: SloSpec, block_bytes: float) -> None:
        self.demand, self.slo = demand, slo
        self.block_bytes = block_bytes
        self._cached: dict[int, Floats] = {}
        self._computing: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        self._waits: dict[tuple[object, ...], Floats] = {}
        self._steps: dict[tuple[str, int, float], decoding.Steps] = {}
        self._rows: dict[float, Rows] = {}
        self._prefills: dict[tuple[object, ...], prefilling.FirstTokens] = {}
        self._top = self._level(max(demand.reuse.blocks_max, 1)) + 1

    def _level(self, blocks: float) -> int:
        return math.floor(LEVELS_PER_DOUBLING * math.log2(blocks) + 1e-9) if blocks >= 1 else -1

    def cached(self, level: int) -> Floats:
        """Leading tokens of each prompt that a pool of this level has."""
        level = min(level, self._top)
        if level not in self._cached:
            blocks = 2 ** (level / LEVELS_PER_DOUBLING) if level >= 0 else 0
            self._cached[level] = self.demand.reuse.cached_tokens(blocks + 1e-6).astype(np.float64)
        return self._cached[level]

    def levels(self, layout: Layout) -> tuple[int, int]:
        """(memory, memory and disks) of the pool as levels."""
        memory = layout.nodes * math.floor(layout.dram.gb * GB / self.block_bytes)
        disks = layout.nodes * math.floor(layout.ssd.gb * GB / self.block_bytes)
        return min(self._level(memory), self._top), min(self._level(memory + disks), self._top)

    @property
    def unlimited(self) -> int:
        """The level of a pool that keeps everything."""
        return self._top

    def computing(self, engine: InstanceType, level: int, stages: int) -> tuple[Floats, Floats]:
        """(busy, way through) of every prompt on this instance with a pool of this level, seconds."""
        key = (engine.name, level, stages)
        if key not in self._computing:
            tokens = self.demand.input_tokens
            self._computing[key] = prefilling.compute_s(engine, tokens, self.cached(level), stages)
        return self._computing[key]

    def rows(self, admitted: float) -> Rows:
        """The requests that are let in when this share is, spread evenly over time."""
        if admitted not in self._rows:
            place = np.arange(1, len(self.demand) + 1) * _GOLDEN % 1.0
            self._rows[admitted] = (
                np.flatnonzero(place < admitted) if admitted < 1 else np.arange(len(self.demand))
            )
        return self._rows[admitted]

    def waits(self, engine: InstanceType, level: int, instances: int, admitted: float) -> Floats:
        """Seconds that every prompt that is let in waits for an instance."""
        key = (engine.name, level, instances, admitted)
        if key not in self._waits:
            busy, _ = self.computing(engine, level, 1)
            rows = self.rows(admitted)
            self._waits[key] = prefilling.waits_s(self.demand.arrival_s[rows], busy[rows], instances)
        return self._waits[key]

    def ideal_prefill(self, engine: InstanceType, nodes: int, stages: int, target: float) -> bool:
        """Whether enough first tokens are in time with an unlimited pool and network: no layout does better."""
        _, through = self.computing(engine, self.unlimited, stages)
        return self._enough(
            target,
            lambda share: (
                self.waits(engine, self.unlimited, nodes * engine.per_node, share) + through[self.rows(share)]
                <= self.slo.ttft_s
            ),
        )

    def ideal_decode(self, engine: InstanceType, nodes: int, target: float) -> bool:
        """Whether enough times between tokens are kept when every prompt is computed at once."""
        return self._enough(target, lambda share: self.decode_met(engine, nodes, share))

    def _enough(self, target: float, met: Callable[[float], Bools]) -> bool:
        return any(
            np.count_nonzero(met(share)) >= target * len(self.demand) for share in ADMITTED if share >= target
        )

    def steps(self, engine: InstanceType, nodes: int, admitted: float) -> decoding.Steps:
        """Decoding on so many machines."""
        key = (engine.name, nodes, admitted)
        if key not in self._steps:
            demand, rows = self.demand, self.rows(admitted)
            self._steps[key] = decoding.steps(
                engine,
                nodes * engine.per_node,
                demand.arrival_s[rows],
                demand.input_tokens[rows],
                demand.output_tokens[rows],
            )
        return self._steps[key]

    def decode_met(self, engine: InstanceType, nodes: int, admitted: float) -> Bools:
        """Whose time between tokens is kept, with room for the KV."""
        steps = self.steps(engine, nodes, admitted)
        met: Bools = (steps.tbt_s <= self.slo.tbt_s) & steps.fits
        return met

    def first_tokens(self, layout: Layout, admitted: float) -> prefilling.FirstTokens:
        """Times to the first token in this layout, of the requests that are let in."""
        memory, total = self.levels(layout)
        key = (
            layout.prefill.name, layout.prefill_nodes, layout.stages, layout.nic, layout.ssd.read_gb_per_s,
            memory, total, layout.nodes if layout.ssd.gb else 0, layout.decode.name, admitted,
        )  # fmt: skip
        if key not in self._prefills:
            self._prefills[key] = self._first_tokens(layout, memory, total, admitted)
        return self._prefills[key]

    def _first_tokens(
        self, layout: Layout, memory: int, total: int, admitted: float
    ) -> prefilling.FirstTokens:
        """With the whole pool; where fetching is slower than computing, without disks or without a pool if better."""
        best = self._with_pool(layout, memory, total, admitted)
        slow = prefilling.slow_fetch(self._network(layout), best, layout.prefill.prefill[1])
        for levels in ((memory, memory), (-1, -1)) if slow else ():
            other = self._with_pool(layout, *levels, admitted)
            if np.mean(other.ttft_s <= self.slo.ttft_s) > np.mean(best.ttft_s <= self.slo.ttft_s):
                best = other
        return best

    def _network(self, layout: Layout) -> prefilling.PoolCosts:
        disks = max(layout.ssd.read_gb_per_s, 1e-9) * GB
        return prefilling.PoolCosts(layout.prefill.kv_bytes_per_token, layout.nic.bytes_per_s, disks)

    def _with_pool(self, layout: Layout, memory: int, total: int, admitted: float) -> prefilling.FirstTokens:
        demand, engine, rows = self.demand, layout.prefill, self.rows(admitted)
        tokens, cached = demand.input_tokens[rows], self.cached(total)[rows]
        on_disk = cached - self.cached(memory)[rows]
        busy, through = (seconds[rows] for seconds in self.computing(engine, total, layout.stages))
        waits = self.waits(engine, total, layout.prefill_instances, admitted)
        network = self._network(layout)
        nic, disks = prefilling.loads(
            network, cached, on_disk, tokens, demand.span_s, layout.prefill_nodes, layout.nodes
        )
        fetches = prefilling.fetches_s(network, cached, on_disk, nic, disks)
        joining = prefilling.joining_s(network, layout.decode, tokens, through, nic)
        ttft = np.maximum(waits, fetches) + through + joining
        computing = float(busy.sum()) / (demand.span_s * layout.prefill_instances)
        return prefilling.FirstTokens(ttft, cached, computing, nic, disks)

    def met(self, layout: Layout, admitted: float) -> int:
        """Requests within both SLOs when this share of all is let in."""
        in_time = self.first_tokens(layout, admitted).ttft_s <= self.slo.ttft_s
        return int(np.count_nonzero(in_time & self.decode_met(layout.decode, layout.decode_nodes, admitted)))

    def reaches(self, layout: Layout, target: float) -> bool:
        """Whether this share of all requests is within both SLOs."""
        return any(
            self.met(layout, share) >= target * len(self.demand) for share in ADMITTED if share >= target
        )

    def admitted(self, layout: Layout) -> tuple[float, float]:
        """(share to let in, share of all within both SLOs): the best of the shares."""
        best = (1.0, -1.0)
        for share in ADMITTED:
            if share <= best[1]:
                break
            met = self.met(layout, share) / len(self.demand)
            if met > best[1]:
                best = (share, met)
        return best

    def attainment(self, layout: Layout) -> float:
        """Share of requests within both SLOs."""
        return self.admitted(layout)[1]

    def estimate(self, layout: Layout) -> Estimate:
        """Everything the model says about a layout; times are those of requests that are let in."""
        demand, slo = self.demand, self.slo
        admitted, attainment = self.admitted(layout)
        first, steps = (
            self.first_tokens(layout, admitted),
            self.steps(layout.decode, layout.decode_nodes, admitted),
        )
        ttft, tbt = first.ttft_s, steps.tbt_s
        refused = len(demand) - len(ttft)
        p50, p90, p99 = np.quantile(ttft, [0.5, 0.9, 0.99], method="higher")
        tokens = demand.input_tokens[self.rows(admitted)]
        return Estimate(
            attainment=attainment,
            admitted=len(ttft) / len(demand),
            ttft_met=float(np.mean(ttft <= slo.ttft_s)),
            tbt_met=float(np.mean(tbt <= slo.tbt_s)),
            kv_fits=float(np.mean(steps.fits)),
            ttft_mean_s=float(ttft.mean()),
            ttft_p50_s=float(p50),
            ttft_p90_s=float(p90),
            ttft_p99_s=float(p99),
            ttft_at_target_s=_late(ttft, refused, slo.attainment),
            tbt_mean_s=float(tbt.mean()),
            tbt_p90_s=float(np.quantile(tbt, 0.9, method="higher")),
            tbt_at_target_s=_late(tbt, refused, slo.attainment),
            hit_ratio=float(first.cached.sum() / tokens.sum()),
            compute_load=first.computing,
            network_load=first.network,
            disk_load=first.disks,
            kv_load_max=steps.kv_load_max,
            sequences_mean=steps.sequences_mean,
            goodput_per_s=attainment * demand.rate_per_s,
        )


def _late(values: Floats, refused: int, share: float) -> float:
    """The quantile over all requests, those that were refused being infinitely late."""
    return float(np.quantile(np.concatenate((values, np.full(refused, np.inf))), share, method="higher"))
