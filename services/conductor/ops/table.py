"""Which op answers which RPC."""

from __future__ import annotations

from mooncache.conductor.ops import (
    announce_member,
    find_blocks,
    follow_conductor,
    get_conductor_status,
    get_decision,
    lease_limits,
    list_decisions,
    list_hot_prefixes,
    list_instances,
    list_members,
    register_instance,
    report_instance,
    report_progress,
    resume_requests,
    schedule,
    set_instance,
    watch_leadership,
)
from mooncache.conductor.state import ConductorState
from mooncache.runtime.rpc import CONDUCTOR_SERVICE, Handler, RpcTable

# Tenants talk to the gateway; the conductor is for the cluster's own processes and its operators.
ADMIN_ONLY = (
    "RegisterInstance",
    "ReportInstance",
    "Schedule",
    "ReportProgress",
    "GetDecision",
    "ListDecisions",
    "ListInstances",
    "SetInstance",
    "FindBlocks",
    "GetConductorStatus",
    "WatchLeadership",
    "FollowConductor",
    "ResumeRequests",
    "AnnounceMember",
    "ListMembers",
    "LeaseLimits",
    "ListHotPrefixes",
)


def conductor_table(state: ConductorState) -> RpcTable:
    """The RPCs of the conductor bound to `state`."""
    handlers: dict[str, Handler] = {
        "RegisterInstance": register_instance.handle,
        "ReportInstance": report_instance.handle,
        "Schedule": schedule.handle,
        "ReportProgress": report_progress.handle,
        "GetDecision": get_decision.handle,
        "ListDecisions": list_decisions.handle,
        "ListInstances": list_instances.handle,
        "SetInstance": set_instance.handle,
        "FindBlocks": find_blocks.handle,
        "GetConductorStatus": get_conductor_status.handle,
        "WatchLeadership": watch_leadership.handle,
        "FollowConductor": follow_conductor.handle,
        "ResumeRequests": resume_requests.handle,
        "AnnounceMember": announce_member.handle,
        "ListMembers": list_members.handle,
        "LeaseLimits": lease_limits.handle,
        "ListHotPrefixes": list_hot_prefixes.handle,
    }
    return RpcTable(CONDUCTOR_SERVICE, state, handlers, admin_only=ADMIN_ONLY)
