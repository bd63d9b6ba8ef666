"""Prints the page of SGLang's own metric collectors with known values, in a process because metrics are global."""

from __future__ import annotations

import sys

from tests.sglang.package import need_sglang

need_sglang()

LABELS = {"model_name": "tiny", "moe_ep_rank": 1}


def main() -> None:
    """Fill the collectors as an engine does, and print the page."""
    from prometheus_client import generate_latest
    from sglang.srt.observability.metrics_collector import (
        SchedulerMetricsCollector,
        TokenizerMetricsCollector,
    )
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(enable_metrics=True) as arguments:
        scheduler = SchedulerMetricsCollector(labels=LABELS, server_args=arguments)
        tokens = TokenizerMetricsCollector(server_args=arguments, labels=LABELS)
    scheduler.num_running_reqs.labels(**LABELS).set(3)
    scheduler.num_queue_reqs.labels(**LABELS).set(2)
    scheduler.token_usage.labels(**LABELS).set(0.25)
    streaming = {**LABELS, "is_streaming": "true"}
    tokens.prompt_tokens_total.labels(**streaming).inc(100)
    tokens.cached_tokens_total.labels(**LABELS, cache_source="device").inc(60)
    tokens.generation_tokens_total.labels(**streaming).inc(9)
    sys.stdout.buffer.write(generate_latest())


if __name__ == "__main__":
    main()
