"""Settings that a running process takes over without a restart, and what of a new configuration has to wait for one.

SIGHUP has a process read its configuration again: the same file and environment as at its start. Values that are used
afresh for each request or line are taken over; the others are named in the log, and stay as they are until the next
start.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mooncache.config import Config, explain
from mooncache.config.base import Section

LIVE: Final = frozenset(
    """
    logging.level
    gateway.requests_per_minute gateway.tokens_per_minute gateway.request_count_max gateway.tenant_request_count_max
    gateway.tenant_token_count_max gateway.body_bytes_max gateway.open_body_bytes_max gateway.tenant_body_bytes_max
    gateway.first_token_timeout_s gateway.stall_timeout_s gateway.request_timeout_s gateway.prefill_attempts
    gateway.cors_origins
    """.split()  # noqa: SIM905  (a list of strings is no easier to read)
)
"""Names of the settings that need no restart."""


class Reloaded(NamedTuple):
    """The configuration that is in force now, the names of what changed in it, and of what waits for the next start."""

    config: Config
    changed: tuple[str, ...]
    waiting: tuple[str, ...]


def take_over(now: Config, wanted: Config) -> Reloaded:
    """The present configuration with what can be taken over from the wanted one."""
    before = {row.name: row.value for row in explain(now)}
    differing = [row.name for row in explain(wanted) if row.value != before[row.name]]
    changed = [name for name in differing if name in LIVE]
    sections: dict[str, Section] = {}
    for name in changed:
        section, field = name.split(".", 1)
        present = sections.get(section, getattr(now, section))
        value = getattr(getattr(wanted, section), field)
        sections[section] = present.model_copy(update={field: value})
    waiting = tuple(name for name in differing if name not in LIVE)
    return Reloaded(now.model_copy(update=sections), tuple(changed), waiting)
