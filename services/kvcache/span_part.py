"""What a leg does during a span of a request's line of time, as the conductor's records name it."""

from __future__ import annotations

from enum import StrEnum


class SpanPart(StrEnum):
    """What a leg does during a span."""

    PLAN = "plan"
    """The gateway reads the request and asks where it goes."""
    WAIT = "wait"
    LOAD = "load"
    QUEUE = "queue"
    COMPUTE = "compute"
    GENERATE = "generate"
    UNKNOWN = "unknown"
