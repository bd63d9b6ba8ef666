"""Who has a use for a setting: what nearly every cluster sets, what some need, and what only experts turn."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Audience(StrEnum):
    """For whom a setting is."""

    COMMON = "you will want these"
    SOME = "you may need these"
    EXPERTS = "for experts"


_COMMON: Final = frozenset(
    [
        "cluster.state_dir",
        "cluster.token_file",
        "cluster.master_targets",
        "cluster.conductor_target",
        "master.host",
        "master.port",
        "store_node.host",
        "store_node.data_host",
        "store_node.capacity_bytes",
        "conductor.host",
        "conductor.port",
        "conductor.ttft_slo_s",
        "conductor.tbt_slo_s",
        "gateway.host",
        "gateway.port",
        "gateway.keys_file",
        "worker.host",
        "worker.role",
        "worker.engine",
        "worker.model",
        "worker.engine_host",
        "tls.enabled",
        "tls.cert_file",
        "tls.key_file",
        "tls.ca_file",
        "logging.level",
        "tracing.endpoint",
    ]
)
_EXPERTS: Final = frozenset(
    [
        "master.heartbeat_interval_s",
        "master.suspect_after_s",
        "master.lease_s",
        "master.slow_start_s",
        "store_node.unix_path",
        "store_node.expected_block_bytes",
        "store_node.huge_pages",
        "store_node.prefault",
        "store_node.numa_node",
        "store_node.io_threads",
        "client.idle_timeout_s",
        "client.shm_enabled",
        "client.receive_pool_bytes",
        "rdma.gid_index",
        "rdma.ack_timeout",
        "rdma.traffic_class",
        "rdma.service_level",
        "coordination.prefix",
        "coordination.lease_s",
        "coordination.kubernetes_account",
        "conductor.report_interval_s",
        "conductor.suspect_after_s",
        "conductor.lease_s",
        "conductor.inline_tokens_max",
        "conductor.handover_margin_s",
        "gateway.open_body_bytes_max",
        "gateway.tenant_body_bytes_max",
        "gateway.prefill_attempts",
        "gateway.capture_block_tokens",
        "hf.prefill_chunk_tokens",
        "connector.load_threads",
        "connector.registered_bytes_max",
        "connector.load_timeout_s",
        "connector.save_timeout_s",
        "connector.save_queue_bytes_max",
        "connector.layerwise",
    ]
)
NAMED: Final = _COMMON | _EXPERTS


def audience_of(name: str) -> Audience:
    """For whom `section.name` is."""
    if name in _COMMON:
        return Audience.COMMON
    return Audience.EXPERTS if name in _EXPERTS else Audience.SOME
