"""GetConductorStatus: how the conductor decides, and what it has done since it started."""

from __future__ import annotations

from collections import Counter

from mooncache._version import __version__
from mooncache.conductor.core.registry import InstanceState
from mooncache.conductor.messages import gateway_message
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.GetConductorStatusRequest, context: CallContext
) -> pb.GetConductorStatusResponse:
    """The conductor's status."""
    done, section = state.instruments.done, state.section
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
    )
