"""The small engine on Hugging Face transformers (`mooncache.hf_engine`)."""

from __future__ import annotations

import sys
from typing import ClassVar

from mooncache.kvcache.pool_link import INSTANCE_VARIABLE
from mooncache.worker.adapters.base import Command, EngineAdapter, Launch, section_env
from mooncache.worker.core.load import MetricNames


class HfAdapter(EngineAdapter):
    """The adapter of the small engine; its settings are the sections hf and connector."""

    name: ClassVar[str] = "hf"
    metrics: ClassVar[MetricNames] = MetricNames(
        waiting=("mooncache_hf_num_requests_waiting",),
        running=("mooncache_hf_num_requests_running",),
        kv_usage=("mooncache_hf_kv_cache_usage_perc",),
        ttft=("mooncache_hf_time_to_first_token_seconds",),
        tbt=("mooncache_hf_inter_token_latency_seconds",),
        prompt_tokens=("mooncache_hf_prompt_tokens_total",),
        prompt_tokens_cached=("mooncache_hf_prefix_cache_hits_total", "mooncache_hf_pool_hits_total"),
        output_tokens=("mooncache_hf_generation_tokens_total",),
        local_hit_tokens=("mooncache_hf_prefix_cache_hits_total",),
        pool_hit_tokens=("mooncache_hf_pool_hits_total",),
    )

    @property
    def max_sequences(self) -> int:
        return self.config.hf.batch_max

    @property
    def orders_by_priority(self) -> bool:
        return True

    def command(self, launch: Launch) -> Command:
        env = section_env(self.config, ("cluster", "hf", "connector", "tls", "logging", "tracing"))
        env["MOONCACHE_ENGINE_API_KEY"] = launch.engine_key
        env[INSTANCE_VARIABLE] = launch.instance_id
        arguments: tuple[str, ...] = (
            sys.executable,
            "-m",
            "mooncache.hf_engine",
            "--model",
            launch.model,
            "--served-model-name",
            launch.model_name,
            "--host",
            launch.host,
            "--port",
            str(launch.port),
            "--passport-path",
            str(launch.passport_path),
        )
        if launch.tls_cert is not None and launch.tls_key is not None:
            arguments += ("--ssl-certfile", str(launch.tls_cert), "--ssl-keyfile", str(launch.tls_key))
        return Command(arguments, env)
