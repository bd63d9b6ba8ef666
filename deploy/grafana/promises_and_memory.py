"""Panels for who promises latencies to clients, and for who pays for memory."""

from __future__ import annotations

from vocabulary import RATE, SAMPLED, Panel, over, quantiles, rate

PANELS: tuple[Panel, ...] = (
    Panel(
        "First token within",
        "Share of requests whose first token came within 1, 5 and 30 s of their arrival at the gateway, by model.",
        "percentunit",
        tuple(
            (
                over(
                    f'sum by (model) (rate(mooncache_gateway_ttft_seconds_bucket{{le="{limit_s}"}}{RATE}))',
                    rate("mooncache_gateway_ttft_seconds_count", "model"),
                ),
                f"{{{{model}}}} {limit_s} s",
            )
            for limit_s in ("1.0", "5.0", "30.0")
        ),
    ),
    Panel(
        "Promises that could not be made",
        "Requests that admission refused, by the reason: the promised time to the first token, or between tokens, ...",
        "reqps",
        ((rate('mooncache_conductor_decisions_total{reason!="admitted"}', "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Whole requests",
        "From the request's arrival to the end of its answer, by endpoint.",
        "s",
        quantiles("mooncache_gateway_request_duration_seconds", "endpoint"),
    ),
    Panel(
        "Before the engines",
        "99th percentile of what the cluster adds: all until the legs are sent, and in it tokenising and the decision.",
        "s",
        tuple(
            (f"histogram_quantile(0.99, {rate(f'mooncache_gateway_{name}_seconds_bucket', 'le')})", legend)
            for name, legend in (("overhead", "all"), ("tokenise", "tokenise"), ("schedule", "decide"))
        ),
    ),
    Panel(
        "Tokens by model",
        "Prompt tokens and generated tokens of ended requests.",
        "cps",
        (
            (rate("mooncache_gateway_prompt_tokens_total", "model"), "{{model}} prompt"),
            (rate("mooncache_gateway_output_tokens_total", "model"), "{{model}} generated"),
        ),
    ),
    Panel(
        "Prompt tokens from caches",
        "Share of the prompt tokens of each model that no engine had to compute.",
        "percentunit",
        (
            (
                over(
                    rate("mooncache_gateway_cached_tokens_total", "model"),
                    rate("mooncache_gateway_prompt_tokens_total", "model"),
                ),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Work that may wait",
        "Requests of batches under way, and batches.",
        "short",
        (
            ("sum(mooncache_gateway_offline_requests_open)", "requests"),
            ("sum(mooncache_gateway_batches_open)", "batches"),
        ),
    ),
    Panel(
        "What lies where",
        "Bytes of blocks by tier, over all nodes and tenants.",
        "bytes",
        (("sum by (tier) (mooncache_store_node_tenant_bytes)", "{{tier}}"),),
        stacked=True,
    ),
    Panel(
        "Between memory and disks",
        "Bytes per second that went down to disks before memory evicted them, and came up again.",
        "Bps",
        ((rate("mooncache_store_node_tenant_moved_bytes_total", "direction"), "{{direction}}"),),
    ),
    Panel(
        "Hits, and what more memory would bring",
        "Of the blocks that were asked for: found; stored once, but no longer here, which more memory would have kept; "
        "never stored, where no memory helps. From a sample of the chains.",
        "percentunit",
        (
            (f"{rate(SAMPLED % 'found')} / {rate(SAMPLED % 'asked')}", "found"),
            (
                f"({rate(SAMPLED % 'unlimited')} - {rate(SAMPLED % 'found')}) / {rate(SAMPLED % 'asked')}",
                "more memory would find",
            ),
            (
                f"({rate(SAMPLED % 'asked')} - {rate(SAMPLED % 'unlimited')}) / {rate(SAMPLED % 'asked')}",
                "never stored",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Hits over those of unlimited memory",
        "1: more memory would bring nothing. By node.",
        "percentunit",
        (
            (
                f"{rate(SAMPLED % 'found', 'instance')} / {rate(SAMPLED % 'unlimited', 'instance')}",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Evicted bytes",
        "Bytes per second that each node evicted from memory.",
        "Bps",
        ((rate("mooncache_store_node_store_evicted_bytes_total", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Pinned and being written",
        "Share of each node's memory that cannot be evicted now.",
        "percentunit",
        tuple(
            (
                f"mooncache_store_node_store_{name}_bytes / mooncache_store_node_store_capacity_bytes",
                f"{{{{instance}}}} {name}",
            )
            for name in ("pinned", "reserved")
        ),
    ),
    Panel(
        "Tenants that hold most",
        "Bytes in memory and on disks of the ten largest tenants. `mooncache cost` puts prices on them.",
        "bytes",
        (("topk(10, sum by (tenant) (mooncache_store_node_tenant_bytes))", "{{tenant}}"),),
    ),
    Panel(
        "What memory earns",
        "Prompt tokens per second that were not computed, for each GB of blocks in memory. `mooncache cost` "
        "turns both into money, `mooncache cost what-if` says what another size would earn.",
        "cps",
        (
            (
                over(
                    rate("mooncache_gateway_cached_tokens_total"),
                    "(sum(mooncache_store_node_store_used_bytes) / 1e9)",
                ),
                "tokens per GB",
            ),
        ),
    ),
)
