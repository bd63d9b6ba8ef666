"""The scheduling policies: pure functions over plain data, by name.

`find(name).choose(request, fleet, rules, rng)` is the whole of a decision: which instance computes the prompt and
how it comes by the prefix, which one generates, and whether the request is taken at all.
"""

from mooncache.conductor.core.policy.registry import NAMES, find

__all__ = ["NAMES", "find"]
