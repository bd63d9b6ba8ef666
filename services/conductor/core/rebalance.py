"""Roles of running instances: the policy's plans, carried over to instances that may really change.

The policy (`policy/roles.py`) says how many instances of which side should change; here its picks become names. Left
alone are instances whose role an operator chose, and those that cannot hand over KV: without the pool, or with blocks
of their own kind. A side is never emptied: each keeps one ready instance. One planner per model, because its
smoothing and hysteresis are about that model's load.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from mooncache.conductor.core.models import ServedModel
from mooncache.conductor.core.policy.fleet import DECODE, PREFILL, ROLE_NAMES
from mooncache.conductor.core.policy.roles import SWITCH_S, RolePlanner
from mooncache.conductor.core.registry import Registry
from mooncache.kvcache.instance_role import InstanceRole


class RoleKeeper:
    """Turns planned role switches into commands for named instances."""

    def __init__(self, tbt_slo_s: float, switch_s: float = SWITCH_S) -> None:
        """switch_s: how long an instance that changes its role is missing on both sides."""
        self._tbt_slo_s, self._switch_s = tbt_slo_s, switch_s
        self._planners: dict[str, RolePlanner] = {}

    def needs(self, model: str) -> tuple[float, float]:
        """Instances that a model's prompts and answers need, as of the last plan; (0, 0) before it."""
        planner = self._planners.get(model)
        return (planner.needs.prefill, planner.needs.decode) if planner is not None else (0.0, 0.0)

    def models(self) -> list[str]:
        """Models that plans are made for."""
        return list(self._planners)

    def plan(
        self, model: ServedModel, registry: Registry, pinned: AbstractSet[str], now_s: float
    ) -> list[tuple[str, InstanceRole]]:
        """(instance, role) for each that should change now, none most of the time. Call at even intervals."""
        planner = self._planners.setdefault(model.name, RolePlanner(self._switch_s))
        group, _ = model.group(0, registry)
        fleet = model.book.view(now_s)
        able = fleet.ready & fleet.pool & (fleet.group == group)
        switches = planner.plan(replace(fleet, ready=able), model.book.arrived_s, self._tbt_slo_s, now_s)
        if not switches:
            return []
        wanted = switches[0].role
        giver = DECODE if wanted == PREFILL else PREFILL
        givers = np.flatnonzero(able & (fleet.role == giver))
        load = fleet.queue_s if giver == PREFILL else fleet.sequences
        order = givers[np.argsort(load[givers], kind="stable")].tolist()
        names = [fleet.names[row] for row in order if fleet.names[row] not in pinned]
        count = min(len(switches), len(order) - 1)
        return [(name, ROLE_NAMES[wanted]) for name in names[:count]]

    def forget(self, served: AbstractSet[str]) -> None:
        """Forget planners of models that no instance serves now."""
        for name in [name for name in self._planners if name not in served]:
            del self._planners[name]
