"""Rules of the master for tests: as a fresh configuration makes them, with what a test changes."""

from __future__ import annotations

import dataclasses
from typing import Any

from mooncache.config import MasterSection
from mooncache.master.core.membership import MembershipRules
from mooncache.master.core.placement import PlacementRules
from mooncache.master.core.rebalance_types import RebalanceRules
from mooncache.master.core.repair_types import RepairRules
from mooncache.master.limits import MasterLimits

_LIMITS = MasterLimits.of(MasterSection())


def membership_rules(**changed: Any) -> MembershipRules:
    return dataclasses.replace(_LIMITS.membership, **changed)


def placement_rules(**changed: Any) -> PlacementRules:
    return dataclasses.replace(_LIMITS.placement, **changed)


def repair_rules(**changed: Any) -> RepairRules:
    return dataclasses.replace(_LIMITS.repair, **changed)


def rebalance_rules(**changed: Any) -> RebalanceRules:
    return dataclasses.replace(_LIMITS.rebalance, **changed)
