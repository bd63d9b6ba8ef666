"""Which op answers which RPC."""

from __future__ import annotations

from mooncache.master.ops import (
    drain_node,
    get_cluster_map,
    get_quarantine,
    get_repair,
    get_status,
    get_task,
    get_usage,
    heartbeat,
    list_tasks,
    list_tenants,
    locate,
    match,
    pin_blocks,
    purge_tenant,
    register_node,
    remove_blocks,
    replicate_blocks,
    report_blocks,
    report_wrong_blocks,
    set_quarantine,
    set_tenant,
    trim_blocks,
    unpin_blocks,
    watch_cluster_map,
)
from mooncache.master.state import MasterState
from mooncache.runtime.rpc import MASTER_SERVICE, Handler, RpcTable

# Only the cluster's own processes and its operators may change what the cluster is.
ADMIN_ONLY = (
    "RegisterNode",
    "Heartbeat",
    "ReportBlocks",
    "DrainNode",
    "SetTenant",
    "ListTenants",
    "PurgeTenant",
    "GetRepair",
    "ReportWrongBlocks",
    "SetQuarantine",
    "GetQuarantine",
)


def master_table(state: MasterState) -> RpcTable:
    """The RPCs of the master bound to `state`."""
    handlers: dict[str, Handler] = {
        "RegisterNode": register_node.handle,
        "Heartbeat": heartbeat.handle,
        "ReportBlocks": report_blocks.handle,
        "GetClusterMap": get_cluster_map.handle,
        "WatchClusterMap": watch_cluster_map.handle,
        "Locate": locate.handle,
        "Match": match.handle,
        "PinBlocks": pin_blocks.handle,
        "UnpinBlocks": unpin_blocks.handle,
        "RemoveBlocks": remove_blocks.handle,
        "ReplicateBlocks": replicate_blocks.handle,
        "TrimBlocks": trim_blocks.handle,
        "DrainNode": drain_node.handle,
        "GetTask": get_task.handle,
        "ListTasks": list_tasks.handle,
        "GetUsage": get_usage.handle,
        "SetTenant": set_tenant.handle,
        "ListTenants": list_tenants.handle,
        "PurgeTenant": purge_tenant.handle,
        "GetRepair": get_repair.handle,
        "ReportWrongBlocks": report_wrong_blocks.handle,
        "SetQuarantine": set_quarantine.handle,
        "GetQuarantine": get_quarantine.handle,
        "GetStatus": get_status.handle,
    }
    return RpcTable(MASTER_SERVICE, state, handlers, admin_only=ADMIN_ONLY)
