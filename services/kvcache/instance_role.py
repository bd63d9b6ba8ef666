"""What an engine is used for, as workers, conductor, simulator and commands name it."""

from __future__ import annotations

from enum import StrEnum


class InstanceRole(StrEnum):
    """The part of requests that an instance takes."""

    PREFILL = "prefill"  # computes prompts
    DECODE = "decode"  # generates; computes what little of a prompt is missing
    BOTH = "both"
