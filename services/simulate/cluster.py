"""What is simulated: instances, their memory and links, the model on them, and what happens to them.

Idea: a cluster is a few groups of equal instances. Every number carries its unit in its name, every limit is
checked before the first event, and a wrong name is an error with the nearest right one (reading: description.py).
Invariant: a spec that passed `check` can be simulated: someone can prefill, someone can decode, every link moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from mooncache.errors import ClusterInvalid, InvalidArgument, ModelTooLarge, SimulationInvalid
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.simulate.cache import LEARNT, make
from mooncache.simulate.profile import LLAMA3_70B_8XA800, ModelProfile

GBPS: Final = 1e9 / 8  # bytes/s of one Gbps


class PoolScope(StrEnum):
    """Whose blocks a node can read."""

    GLOBAL = "global"  # any node reads from any other
    LOCAL = "local"  # a node uses only what it holds itself


class FirstToken(StrEnum):
    """Which instance sends a request's first token."""

    PREFILL = "prefill"
    DECODE = "decode"


class InlineMode(StrEnum):
    """How a prompt is computed inside a decode batch."""

    WHOLE = "whole"  # the batch stands still
    CHUNKED = "chunked"  # a chunk of chunk_tokens in every step


class EventKind(StrEnum):
    """What happens to a simulated instance."""

    FAIL = "fail"
    JOIN = "join"
    ROLE = "role"


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` equal instances, each a node with its own memory and links."""

    role: InstanceRole
    count: int
    name: str = ""
    dram_blocks: int = 5859  # pool space for KV blocks in the DRAM of each node
    ssd_blocks: int = 0  # pool space for KV blocks on the SSD of each node
    nic_in_gbps: float = 800.0
    nic_out_gbps: float = 800.0
    nic_efficiency: float = 0.87  # the share of the line rate that transfers reach
    fetch_latency_s: float = 0.005
    ssd_read_gbytes_per_s: float = 6.0
    ssd_write_gbytes_per_s: float = 0.0  # as a store node's ssd_write_bytes_per_s, 0 for no limit
    eviction: str = LEARNT
    pipeline_size: int = 1  # prefill instances that can compute one prompt together (1: alone)
    kv_capacity_tokens: int = 0  # GPU memory for KV while decoding, 0 takes the profile's
    sequences_max: int = 0  # limit of the batch, 0 for none
    keep_handover: bool = True  # blocks that come for decoding stay in the DRAM for others to read
    inline: InlineMode = InlineMode.WHOLE  # how a prompt is computed inside a decode batch
    chunk_tokens: int = 512  # of one chunk, for InlineMode.CHUNKED
    profile: ModelProfile | None = None  # None takes the cluster's

    @property
    def label(self) -> str:
        """Name of the group; its instances are `label-0`, `label-1`, ..."""
        return self.name or str(self.role)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is promised: seconds to the first token, seconds between tokens."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1


@dataclass(frozen=True, slots=True)
class RoleSwitching:
    """Whether instances change between prefill and decode by themselves, and what a switch costs."""

    enabled: bool = False
    switch_s: float = 20.0  # from drained to ready in the new role
    every_s: float = 15.0  # how often the roles are planned


@dataclass(frozen=True, slots=True)
class Replication:
    """Whether hot prefixes are copied ahead of demand, and how often that is planned."""

    enabled: bool = False
    every_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """Something that happens to an instance: it fails, joins (at `at_s`, in its group) or gets another role."""

    at_s: float
    kind: EventKind
    instance: str
    role: InstanceRole | None = None


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster of one model."""

    instances: tuple[InstanceGroup, ...]
    name: str = "cluster"
    profile: ModelProfile = LLAMA3_70B_8XA800
    pool: PoolScope = PoolScope.GLOBAL
    block_tokens: int = 512
    first_token: FirstToken = FirstToken.PREFILL
    """Who sends it: the prefill instance as it ends (the papers), or the decode instance after the hand-over (this
    product)."""
    slo: Slo = field(default_factory=Slo)
    roles: RoleSwitching = field(default_factory=RoleSwitching)
    replication: Replication = field(default_factory=Replication)
    events: tuple[ScheduledEvent, ...] = ()

    @property
    def count(self) -> int:
        """Instances at the beginning."""
        return sum(group.count for group in self.instances)

    def names(self) -> list[str]:
        """Names of all instances, in order."""
        return [f"{group.label}-{number}" for group in self.instances for number in range(group.count)]

    def profile_of(self, group: InstanceGroup) -> ModelProfile:
        """The profile of a group's instances."""
        return group.profile or self.profile

    def check(self) -> ClusterSpec:
        """The spec itself. Raises CLUSTER_INVALID, PROFILE_INVALID or MODEL_TOO_LARGE with a full sentence."""
        self.profile.check()
        _one_of("pool", self.pool, PoolScope)
        _one_of("first_token", self.first_token, FirstToken)
        _number("block_tokens", self.block_tokens, "tokens", low=1)
        _number("slo.ttft_s", self.slo.ttft_s, "s", above=0.0)
        _number("slo.tbt_s", self.slo.tbt_s, "s", above=0.0)
        _number("roles.switch_s", self.roles.switch_s, "s", low=0.0)
        _number("roles.every_s", self.roles.every_s, "s", above=0.0)
        _number("replication.every_s", self.replication.every_s, "s", above=0.0)
        labels = [group.label for group in self.instances]
        for label in labels:
            if labels.count(label) > 1:
                raise ClusterInvalid(
                    f"instances: two groups are called {label}; give each a `name` of its own"
                )
        for group in self.instances:
            self._check_group(group)
        roles = {str(group.role) for group in self.instances if group.count > 0}
        if not roles & {InstanceRole.DECODE, InstanceRole.BOTH}:
            raise ClusterInvalid(
                f"instances: roles {sorted(roles) or 'none'}; no group decodes: add one with role decode or both"
            )
        self._check_events()
        return self

    def _check_group(self, group: InstanceGroup) -> None:
        where = f"instances.{group.label}"
        _one_of(f"{where}.role", group.role, InstanceRole)
        _one_of(f"{where}.inline", group.inline, InlineMode)
        for name, (unit, low, above) in _LIMITS.items():
            _number(f"{where}.{name}", getattr(group, name), unit, low=low, above=above)
        if group.nic_efficiency > 1:
            raise ClusterInvalid(
                f"{where}.nic_efficiency is {group.nic_efficiency}: a share of the line rate is at most 1"
            )
        if group.pipeline_size > max(1, group.count):
            raise ClusterInvalid(
                f"{where}.pipeline_size is {group.pipeline_size} instances, but the group has {group.count}"
            )
        if group.pipeline_size > 1 and group.role != InstanceRole.PREFILL:
            raise ClusterInvalid(
                f"{where}.pipeline_size is {group.pipeline_size} instances, but only prefill instances compute "
                f"a prompt together: role {group.role} needs 1"
            )
        try:
            make(group.eviction, 1)
        except InvalidArgument as error:
            raise ClusterInvalid(f"{where}.eviction: {error}") from None
        profile = self.profile_of(group)
        profile.check()
        room = profile.kv_capacity_tokens
        if group.kv_capacity_tokens > room:
            raise ModelTooLarge(
                f"{where}.kv_capacity_tokens is {group.kv_capacity_tokens} tokens, but only {room:.0f} tokens fit the "
                f"GPU memory beside the weights of {profile.name}: lower it, or 0 for all that fits"
            )
        if 0 < room < self.block_tokens:
            raise ModelTooLarge(
                f"{where}: {room:.0f} tokens of KV fit beside the weights of {profile.name}; that is not even one "
                f"block of {self.block_tokens} tokens: take more or larger GPUs"
            )

    def _check_events(self) -> None:
        known = set(self.names())
        labels = {group.label for group in self.instances}
        for number, event in enumerate(self.events, start=1):
            where = f"events[{number}]"
            _one_of(f"{where}.kind", event.kind, EventKind)
            _number(f"{where}.at_s", event.at_s, "s", low=0.0)
            if event.kind == EventKind.JOIN:
                if event.instance not in labels:
                    raise ClusterInvalid(
                        f"{where}.instance is {event.instance}: a join names a group ({', '.join(sorted(labels))})"
                    )
            elif event.instance not in known:
                raise ClusterInvalid(f"{where}.instance is {event.instance}: no instance has this name")
            if event.kind == EventKind.ROLE:
                _one_of(f"{where}.role", event.role or "", InstanceRole)

    def reachable(self, ttft_s: float, tbt_s: float) -> ClusterSpec:
        """The spec itself. Raises SIMULATION_INVALID when even an idle cluster misses these SLOs.

        The message says which limit binds and by how much.
        """
        used = [group for group in self.instances if group.count > 0]
        costs = [(self.profile_of(group), group) for group in used]
        first_s = min(profile.prefill.seconds(1, 0) for profile, _ in costs)
        step_s = min(
            profile.decode.tbt_s(1, 1) for profile, group in costs if group.role != InstanceRole.PREFILL
        )
        for name, promise_s, best_s, what in (
            ("ttft", ttft_s, first_s, "the shortest prompt alone takes"),
            ("tbt", tbt_s, step_s, "a step of one short sequence alone takes"),
        ):
            if promise_s < best_s:
                raise SimulationInvalid(
                    f"the {name} promise is {promise_s:g} s, but {what} {best_s:.4g} s on an idle instance: it is "
                    f"{best_s - promise_s:.4g} s too short for any request, whatever the cluster's size"
                )
        return self


_LIMITS: Final[dict[str, tuple[str, float | None, float | None]]] = {
    # name: (unit, at least, more than)
    "count": ("instances", 0, None),
    "dram_blocks": ("blocks", 0, None),
    "ssd_blocks": ("blocks", 0, None),
    "nic_in_gbps": ("Gbps", None, 0.0),
    "nic_out_gbps": ("Gbps", None, 0.0),
    "nic_efficiency": ("share", None, 0.0),
    "fetch_latency_s": ("s", 0.0, None),
    "ssd_read_gbytes_per_s": ("GB/s", None, 0.0),
    "ssd_write_gbytes_per_s": ("GB/s", 0.0, None),
    "pipeline_size": ("instances", 1, None),
    "kv_capacity_tokens": ("tokens", 0, None),
    "sequences_max": ("sequences", 0, None),
    "chunk_tokens": ("tokens", 1, None),
}


# Values beyond these are another unit, not a large machine.
_LIKELY: Final[dict[str, tuple[float, str]]] = {
    "count": (100_000.0, "a number of blocks or tokens"),
    "ttft_s": (10_000.0, "milliseconds"),
    "tbt_s": (10.0, "milliseconds"),
    "switch_s": (100_000.0, "milliseconds"),
    "fetch_latency_s": (10.0, "milliseconds"),
    "nic_in_gbps": (100_000.0, "Mbps or bytes/s"),
    "nic_out_gbps": (100_000.0, "Mbps or bytes/s"),
    "ssd_read_gbytes_per_s": (10_000.0, "MB/s or bytes/s"),
    "ssd_write_gbytes_per_s": (10_000.0, "MB/s or bytes/s"),
}


def _number(name: str, value: Any, unit: str, low: float | None = None, above: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ClusterInvalid(f"{name} is {value!r}: it has to be a finite number of {unit}")
    if low is not None and value < low:
        raise ClusterInvalid(f"{name} is {value} {unit}: it has to be at least {low}")
    if above is not None and value <= above:
        raise ClusterInvalid(
            f"{name} is {value} {unit}: it has to be more than {above:g}, or no data would ever move"
        )
    most, instead = _LIKELY.get(name.rsplit(".", 1)[-1], (math.inf, ""))
    if value > most:
        raise ClusterInvalid(f"{name} is {value:g} {unit}: more than {most:g} {unit} looks like {instead}")


def _one_of(name: str, value: str, known: type[StrEnum]) -> None:
    if value not in set(known):
        raise ClusterInvalid(f"{name} is {value!r}: choose one of {', '.join(known)}")


def paper_cluster(
    prefill: int = 8, decode: int = 8, dram_tokens: int = 3_000_000, **changes: Any
) -> ClusterSpec:
    """The test bed of FAST'25: nodes of 8 x A800, 4 x 200 Gbps, 3 M tokens of DRAM on each prefill node."""
    blocks = dram_tokens // int(changes.get("block_tokens", 512))
    roles = changes.get("roles", RoleSwitching())
    # Decode nodes take no part in the pool; those that may become prefill nodes have the memory for it.
    spare = blocks if roles.enabled else 0
    groups = (
        InstanceGroup(InstanceRole.PREFILL, prefill, dram_blocks=blocks, keep_handover=False),
        InstanceGroup(InstanceRole.DECODE, decode, dram_blocks=spare, keep_handover=False),
    )
    return ClusterSpec(
        instances=tuple(g for g in groups if g.count), **{"name": f"{prefill}P+{decode}D", **changes}
    )
