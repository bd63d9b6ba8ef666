"""Limits on requests of a tenant or a key, as `mooncache tenant set` and `mooncache key limit` set and print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Final

from cyclopts import Group, Parameter

_REQUESTS: Final = Group("Limits on requests, over all gateways")


@Parameter(name="*")
@dataclass(frozen=True)
class RequestLimitOptions:
    """Limits that were named; None: it stays as it is. 0 takes one away."""

    requests_per_minute: Annotated[
        float | None,
        Parameter(group=_REQUESTS, help="Requests that are admitted in a minute; 0: none of its own."),
    ] = None
    tokens_per_minute: Annotated[
        float | None,
        Parameter(group=_REQUESTS, help="Prompt and output tokens in a minute; 0: none of its own."),
    ] = None
    requests_under_way: Annotated[
        int | None, Parameter(group=_REQUESTS, help="Requests under way; 0: none of its own.")
    ] = None
    tokens_under_way: Annotated[
        int | None,
        Parameter(
            group=_REQUESTS,
            help="Tokens of requests under way: prompts, and what they may generate; 0: none of its own.",
        ),
    ] = None

    money_per_month: Annotated[
        float | None,
        Parameter(
            group=_REQUESTS,
            help="Money in a calendar month (UTC), in the currency of gateway.price_file; 0: none of its own.",
        ),
    ] = None

    priority: Annotated[
        int | None,
        Parameter(
            group=_REQUESTS,
            help="Steps by which requests go before others, -4 to 4; 0: of a key as its tenant's, else normal.",
        ),
    ] = None

    def given(self) -> dict[str, float]:
        """Those that were named."""
        return {name: value for name, value in asdict(self).items() if value is not None}


UNCHANGED: Final = RequestLimitOptions()
REQUEST_OPTIONS: Final = tuple(f"--{each.name.replace('_', '-')}" for each in fields(RequestLimitOptions))


def limits_text(limits: Mapping[str, float]) -> str:
    """Limits as one line."""
    return ", ".join(f"{name} {value:g}" for name, value in limits.items() if value) or "no limits"
