"""Panels of what runs: requests, errors, instances, the pool, the conductor, processes."""

from __future__ import annotations

from vocabulary import RATE, Panel, quantiles, rate, shares

PANELS: tuple[Panel, ...] = (
    Panel(
        "Requests",
        "Answers of all gateways by HTTP status.",
        "reqps",
        ((rate("mooncache_gateway_requests_total", "status"), "{{status}}"),),
        stacked=True,
    ),
    Panel(
        "Time to first token",
        "From the request's arrival at the gateway to the first event of its stream.",
        "s",
        quantiles("mooncache_gateway_ttft_seconds", "model"),
    ),
    Panel(
        "Time between tokens",
        "Mean over each stream, at the gateway.",
        "s",
        quantiles("mooncache_gateway_tbt_seconds", "model"),
    ),
    Panel(
        "Where prompts come from",
        "Prompt tokens by source, as engines reported them: their own cache, the pool, or computed.",
        "percentunit",
        ((shares("mooncache_conductor_observed_tokens_total", "source"), "{{source}}"),),
        stacked=True,
    ),
    Panel(
        "Tokens",
        "Prompt tokens, how many of them came from a cache, and generated tokens.",
        "cps",
        (
            (rate("mooncache_gateway_prompt_tokens_total"), "prompt"),
            (rate("mooncache_gateway_cached_tokens_total"), "cached"),
            (rate("mooncache_gateway_output_tokens_total"), "generated"),
        ),
    ),
    Panel(
        "Under way",
        "Requests in gateways, and prompts being computed.",
        "short",
        (
            ("sum(mooncache_gateway_requests_open)", "requests"),
            ("sum(mooncache_gateway_streams_open)", "streams"),
            ("sum(mooncache_conductor_requests_in_flight)", "prompts in flight"),
        ),
    ),
    Panel(
        "Errors to clients",
        "Error answers by code of the catalogue (docs/reference-errors.md).",
        "reqps",
        ((rate("mooncache_gateway_errors_total", "code"), "{{code}}"),),
        stacked=True,
    ),
    Panel(
        "Legs that failed",
        "Failed requests to engines, and legs that were sent again.",
        "reqps",
        (
            (
                rate('mooncache_gateway_legs_total{code!="OK"}', "leg", "code"),
                "{{leg}} {{code}}",
            ),
            (rate("mooncache_gateway_retries_total", "leg"), "{{leg}} again"),
            (rate("mooncache_gateway_recomputed_total"), "recomputed on decode"),
        ),
    ),
    Panel(
        "Hand-overs from prefill to decode",
        "By outcome; a missed one is computed again by the decode instance after it waited.",
        "reqps",
        (
            (rate("mooncache_conductor_handovers_total", "outcome"), "{{outcome}}"),
            (rate("mooncache_conductor_handovers_avoided_total"), "avoided after misses"),
            (rate("mooncache_gateway_waits_timed_out_total", "model"), "{{model}} timed out waiting"),
            (rate("mooncache_conductor_give_ups_total", "reason"), "given up: {{reason}}"),
        ),
    ),
    Panel(
        "Other than planned",
        "Legs whose engine computed, loaded or waited otherwise than the plan said, and why.",
        "reqps",
        ((rate("mooncache_conductor_plan_differences_total", "kind", "reason"), "{{kind}}: {{reason}}"),),
    ),
    Panel(
        "Served with less",
        "Without a plan of the conductor (round robin), without keys (no cache), over a limit, left by the client.",
        "reqps",
        (
            (rate("mooncache_gateway_unscheduled_total"), "without conductor"),
            (rate("mooncache_gateway_conductor_errors_total", "code"), "conductor erred: {{code}}"),
            (rate("mooncache_gateway_no_keys_total", "reason"), "no keys: {{reason}}"),
            (rate("mooncache_gateway_rate_limited_total", "limit"), "limit: {{limit}}"),
            (rate("mooncache_gateway_aborted_total"), "client left"),
        ),
    ),
    Panel(
        "Engines",
        "1 while the engine of a worker is healthy; 0 while it starts or is restarted.",
        "short",
        (
            ("mooncache_worker_engine_up", "{{instance}}"),
            ("mooncache_worker_draining", "{{instance}} draining"),
        ),
    ),
    Panel(
        "Requests of engines",
        "Running and waiting requests of each engine.",
        "short",
        (
            ("mooncache_worker_requests_running", "{{instance}} running"),
            ("mooncache_worker_requests_waiting", "{{instance}} waiting"),
        ),
    ),
    Panel(
        "KV memory of engines",
        "Share of each engine's own KV blocks in use.",
        "percentunit",
        (("mooncache_worker_kv_usage_ratio", "{{instance}}"),),
    ),
    Panel(
        "Engines: time to first token",
        "Mean over the last seconds, as the engine measures it.",
        "s",
        (("mooncache_worker_ttft_seconds", "{{instance}}"),),
    ),
    Panel(
        "Engines: time between tokens",
        "Mean over the last seconds, as the engine measures it.",
        "s",
        (("mooncache_worker_tbt_seconds", "{{instance}}"),),
    ),
    Panel(
        "Engines: tokens",
        "Prompt tokens, generated tokens, and prompt tokens from caches, of each engine.",
        "cps",
        (
            (rate("mooncache_worker_engine_prompt_tokens_total", "instance"), "{{instance}} prompt"),
            (rate("mooncache_worker_engine_output_tokens_total", "instance"), "{{instance}} generated"),
            (
                rate("mooncache_worker_engine_local_hit_tokens_total", "instance"),
                "{{instance}} own cache",
            ),
            (rate("mooncache_worker_engine_pool_hit_tokens_total", "instance"), "{{instance}} pool"),
        ),
    ),
    Panel(
        "Memory",
        "Share of each node's arena in use. A full node is normal: it evicts.",
        "percentunit",
        (
            (
                "mooncache_store_node_store_used_bytes / mooncache_store_node_store_capacity_bytes",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Blocks that left",
        "Blocks per second by reason: evicted, removed, corrupt, drained, replaced.",
        "ops",
        ((rate("mooncache_store_node_removed_blocks_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Bytes",
        "Over the data ports of the nodes; copies that clients make through shared memory are not seen here.",
        "Bps",
        (
            (rate("mooncache_store_node_bytes_in_total", "instance"), "{{instance}} in"),
            (rate("mooncache_store_node_bytes_out_total", "instance"), "{{instance}} out"),
        ),
    ),
    Panel(
        "Nodes",
        "Nodes by state, as the leading master sees them.",
        "short",
        (
            (
                "max by (state) (mooncache_master_nodes and on (instance) mooncache_master_leading == 1)",
                "{{state}}",
            ),
        ),
    ),
    Panel(
        "Reads and puts",
        "Block reads that hit or missed, and puts by outcome.",
        "ops",
        (
            (rate("mooncache_store_node_hits_total"), "hit"),
            (rate("mooncache_store_node_misses_total", "reason"), "miss: {{reason}}"),
            (rate("mooncache_store_node_puts_total", "outcome"), "put: {{outcome}}"),
        ),
    ),
    Panel(
        "Time of data-plane calls",
        "99th percentile of a node's own time for a call, by operation.",
        "s",
        (
            (
                f"histogram_quantile(0.99, {rate('mooncache_store_node_op_duration_seconds_bucket', 'op', 'le')})",
                "{{op}}",
            ),
        ),
    ),
    Panel(
        "Checksums that did not match",
        "Received: damaged on the way. Stored: damaged in memory. Neither ever reaches an engine.",
        "ops",
        (
            (
                rate("mooncache_store_node_checksum_failures_total", "instance", "place"),
                "{{instance}} {{place}}",
            ),
        ),
    ),
    Panel(
        "Line to the master",
        "Block changes that the master has not confirmed; grows when a node cannot report.",
        "short",
        (("mooncache_store_node_report_lag_events", "{{instance}}"),),
    ),
    Panel(
        "Directory",
        "Distinct blocks that the leading master knows, and whether every node has reported in full.",
        "short",
        (
            ("max(mooncache_master_directory_blocks)", "blocks"),
            ("max(mooncache_master_directory_complete)", "complete"),
        ),
    ),
    Panel(
        "Decisions",
        "Scheduled and refused requests by reason.",
        "reqps",
        ((rate("mooncache_conductor_decisions_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Branches",
        "Source of the KV of admitted prompts: the instance's own cache, fetched, waited for.",
        "reqps",
        ((rate("mooncache_conductor_branches_total", "branch"), "{{branch}}"),),
        stacked=True,
    ),
    Panel(
        "Prediction error",
        "Observed over predicted time to first token; 1 is a perfect prediction.",
        "short",
        quantiles("mooncache_conductor_ttft_observed_over_predicted"),
    ),
    Panel(
        "Time of a decision",
        "Index, policy and record; and the lookup in the pool before it.",
        "s",
        (
            *quantiles("mooncache_conductor_decision_duration_seconds"),
            *(
                (query, f"pool {legend}")
                for query, legend in quantiles("mooncache_conductor_pool_lookup_seconds")
            ),
        ),
    ),
    Panel(
        "Lookups in the pool",
        "By outcome; anything but an answer counts as a miss.",
        "reqps",
        ((rate("mooncache_conductor_pool_lookups_total", "state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Instances",
        "Known instances by state and role.",
        "short",
        (("sum by (state, role) (mooncache_conductor_instances) > 0", "{{role}} {{state}}"),),
    ),
    Panel(
        "Role switches",
        "Instances that followed the load to another role, by new role; only with conductor.rebalance_roles.",
        "short",
        ((f"sum by (role) (increase(mooncache_conductor_role_switches_total{RATE}))", "to {{role}}"),),
    ),
    Panel(
        "Copies of hot prefixes",
        "Requests to the master by kind and outcome, and prefix segments that have further copies now.",
        "short",
        (
            (
                f"sum by (kind, outcome) (increase(mooncache_conductor_copy_orders_total{RATE}))",
                "{{kind}} {{outcome}}",
            ),
            ("sum(mooncache_conductor_copied_segments)", "with copies"),
        ),
    ),
    Panel(
        "Memory of processes",
        "Resident memory of every service; engines are not in it.",
        "bytes",
        (('{__name__=~"mooncache_.+_resident_memory_bytes"}', "{{job}} {{instance}}"),),
    ),
    Panel(
        "Control calls that failed",
        "By service, method and code.",
        "reqps",
        (
            (
                rate('{__name__=~"mooncache_.+_rpc_calls_total", code!="OK"}', "job", "method", "code"),
                "{{job}} {{method}} {{code}}",
            ),
        ),
    ),
    Panel(
        "Background duties that failed",
        "By service and duty; each is tried again after a pause.",
        "ops",
        (
            (
                rate('{__name__=~"mooncache_.+_duty_failures_total"}', "job", "duty"),
                "{{job}} {{duty}}",
            ),
        ),
    ),
)
