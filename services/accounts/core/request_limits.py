"""Limits on requests that an operator sets for a tenant, or for one of its keys beside its tenant's; and priorities."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Final

from mooncache.errors import InvalidArgument

AMOUNT_MAX: Final = 1e12
COUNT_MAX: Final = 1_000_000
PRIORITY_MAX: Final = 4
"""Steps of priority, in both directions; 0 is normal."""
LimitHolder = tuple[str, str]
"""Tenant and key; "" for the tenant's own limits."""


@dataclass(frozen=True, slots=True)
class HolderLimits:
    """All gateways together keep to them. 0: of a tenant as the gateway's setting says, of a key none."""

    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    """Prompt and output tokens."""
    requests_under_way: int = 0
    """From admission to the end of the answer."""
    tokens_under_way: int = 0
    """Of requests under way: tokens of their prompts, and those that they may still generate."""
    money_per_month: float = 0
    """In a calendar month (UTC), in the currency of the gateways' price book."""
    priority: int = 0
    """No limit: steps by which requests go before others, below 0 after them. 0: of a key its tenant's, else normal."""

    def check(self) -> None:
        """Raises InvalidArgument for what no limit can be."""
        limits = asdict(self)
        if not -PRIORITY_MAX <= limits.pop("priority") <= PRIORITY_MAX:
            raise InvalidArgument(f"priority is from -{PRIORITY_MAX} to {PRIORITY_MAX}; 0 is normal.")
        for name, value in limits.items():
            most = COUNT_MAX if name == "requests_under_way" else AMOUNT_MAX
            if not math.isfinite(value) or not 0 <= value <= most:
                raise InvalidArgument(f"{name} is from 0 (no limit) to {most:g}.")

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(asdict(self).values())


LIMIT_NAMES: Final = tuple(each.name for each in fields(HolderLimits))
