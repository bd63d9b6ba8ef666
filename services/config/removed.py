"""Settings of earlier versions that the code chooses now. A configuration that names one is refused with the reason."""

from __future__ import annotations

from typing import Final

REMOVED: Final = frozenset(
    """
    client.connect_timeout_s client.fanout_nodes_max client.lanes_per_node client.registered_buffers_max
    client.registered_bytes_max
    conductor.call_count_max conductor.decision_count_max conductor.drain_timeout_s conductor.instance_count_max
    conductor.pool_match_timeout_s conductor.rebalance_interval_s conductor.seen_block_count_max
    connector.lookup_timeout_s connector.save_threads connector.wait_poll_s
    coordination.call_timeout_s
    gateway.body_bytes_per_token gateway.body_processes gateway.body_timeout_s gateway.capture_queue_max
    gateway.choice_count_max gateway.connect_timeout_s gateway.schedule_timeout_s gateway.tokenizer_cache_bytes
    gateway.tokenizer_threads gateway.write_timeout_s
    master.call_count_max master.drain_timeout_s master.node_count_max master.task_batch_blocks
    master.task_concurrency master.task_count_max master.task_timeout_s master.watch_wait_max_s
    store_node.call_count_max store_node.call_timeout_s store_node.copy_concurrency store_node.drain_timeout_s
    store_node.event_log_capacity store_node.grant_timeout_s store_node.max_connections store_node.peer_timeout_s
    store_node.handshake_timeout_s store_node.idle_timeout_s store_node.max_block_bytes
    store_node.report_batch_blocks store_node.report_interval_s store_node.shards
    hf.max_model_len
    rdma.retry_count
    vllm.load_failure_policy vllm.max_num_batched_tokens
    worker.call_timeout_s worker.event_count_max worker.health_interval_s worker.restart_backoff_first_s
    worker.restart_backoff_max_s worker.restart_count_max
    """.split()  # noqa: SIM905  (a list of fifty strings is no easier to read)
)
