"""GetConductorStatus: how the conductor decides, and what it has done since it started."""

from __future__ import annotations

from collections import Counter

from mooncache._version import __version__
from mooncache.conductor.core.leadership import LeadershipBook
from mooncache.conductor.core.registry import InstanceState
from mooncache.conductor.messages import STANDING_NUMBERS, gateway_message
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.GetConductorStatusRequest, context: CallContext
) -> pb.GetConductorStatusResponse:
    """The conductor's status."""
    done, section, book = state.instruments.done, state.section, state.leadership
    return pb.GetConductorStatusResponse(
        software_version=__version__,
        uptime_ms=round((context.now_s - state.started_s) * 1e3),
        policy=state.core.settings.policy,
        admission=section.admission_enabled,
        rebalance_roles=section.rebalance_roles,
        replicate_bytes_per_s=section.replicate_bytes_per_s,
        pool_connected=state.pool.connected,
        active_request_count=len(state.core.work),
        decisions=done.decisions,
        roles=Counter(
            instance.role for instance in state.core.registry if instance.state == InstanceState.READY
        ),
        role_switches=done.role_switches,
        copied_prefix_count=done.copied_prefixes,
        trimmed_prefix_count=done.trimmed_prefixes,
        trimmed_block_count=done.trimmed_blocks,
        copied_segment_count=state.hot.copied,
        gateways=[
            pb.GatewayView(gateway=gateway_message(info), heard_age_ms=round(age_s * 1e3))
            for info, age_s in state.gateways.listed(context.now_s)
        ],
        conductors=[] if book.alone else conductors(book),
    )


def conductors(book: LeadershipBook) -> list[pb.ConductorView]:
    """This conductor and the others, as it saw them last."""
    found = []
    for target, view in zip(book.targets, book.views, strict=False):
        standing, term = (book.standing, book.term) if view.is_self else (view.standing, view.term)
        listed = pb.ConductorView(
            target=target, role=STANDING_NUMBERS[standing], term=term, self=view.is_self
        )
        listed.behind_ms = round(book.behind_s * 1e3) if view.is_self and not book.leads else 0
        found.append(listed)
    return found
