"""The policies by name."""

from __future__ import annotations

from mooncache.conductor.core.policy import baselines, published
from mooncache.conductor.core.policy.algorithm1 import Algorithm1
from mooncache.conductor.core.policy.common import Policy
from mooncache.conductor.core.policy.mooncache import Mooncache

_ALL: tuple[Policy, ...] = (
    Mooncache(),
    Algorithm1("algorithm1", fetches=True),
    Algorithm1("local", fetches=False),
    baselines.Random(),
    baselines.RoundRobin(),
    baselines.LeastLoad(),
    baselines.LongestPrefix(),
    published.Dynamo(),
    published.LMetric(),
    published.DualMap(),
    published.Preble(),
)
_BY_NAME = {policy.name: policy for policy in _ALL}
NAMES = tuple(_BY_NAME)


def find(name: str) -> Policy:
    """The policy of that name. Raises ValueError with the names that there are."""
    if name not in _BY_NAME:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(NAMES)}")
    return _BY_NAME[name]
