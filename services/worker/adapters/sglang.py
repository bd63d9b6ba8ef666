"""SGLang: `sglang.launch_server`, with its pages in the pool, and its cache events on a socket that only this user can
reach.

The server takes its key on the command line alone, where every user of the machine reads it. So a launcher of ours
(`connectors/sglang/serve.py`) takes it from the environment; it also writes the passport file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar

from mooncache.kvcache.pool_link import INSTANCE_VARIABLE
from mooncache.worker.adapters.base import (
    Command,
    EngineAdapter,
    Launch,
    ranks_without_events,
    section_env,
)
from mooncache.worker.core.facts import EngineFacts, facts_from_server_info
from mooncache.worker.core.load import MetricNames

LAUNCHER = "mooncache.connectors.sglang.serve"
HICACHE = {
    "backend_name": "mooncache",
    "module_path": "mooncache.connectors.sglang",
    "class_name": "MooncacheHiCache",
    "interface_v1": 1,
}


class SglangAdapter(EngineAdapter):
    """The adapter of SGLang; its settings are the sections sglang and connector."""

    name: ClassVar[str] = "sglang"
    kv_events: ClassVar[bool] = True
    info_path: ClassVar[str] = "/server_info"
    metrics: ClassVar[MetricNames] = MetricNames(
        waiting=("sglang:num_queue_reqs",),
        running=("sglang:num_running_reqs",),
        kv_usage=("sglang:token_usage",),
        ttft=("sglang:time_to_first_token_seconds",),
        tbt=("sglang:inter_token_latency_seconds",),
        prompt_tokens=("sglang:prompt_tokens_total",),
        prompt_tokens_cached=("sglang:cached_tokens_total",),
        output_tokens=("sglang:generation_tokens_total",),
        local_hit_tokens=("sglang:cached_tokens_total",),
    )

    @property
    def publishes_events(self) -> bool:
        return self.config.sglang.kv_events and not self.why_no_events

    @property
    def why_no_events(self) -> str:
        if not self.config.sglang.kv_events:
            return ""
        names = ("--dp-size", "--data-parallel-size", "--dp", "--attn-dp-size")
        return ranks_without_events(self.config.sglang.extra_args, *names)

    @property
    def makes_passport(self) -> bool:
        """The launcher writes it, for the keys of the engine's own cache. Pages in the pool have other names."""
        return True

    @property
    def max_sequences(self) -> int:
        return self.config.sglang.max_num_seqs

    def facts(self, models: object, info: object, page: str) -> EngineFacts:
        del page
        return facts_from_server_info(models, info)

    def command(self, launch: Launch) -> Command:
        env = section_env(self.config, ("cluster", "connector", "tls", "logging", "tracing"))
        env |= {"MOONCACHE_ENGINE_API_KEY": launch.engine_key, INSTANCE_VARIABLE: launch.instance_id}
        if Path(launch.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        return Command((sys.executable, "-m", LAUNCHER, *self._arguments(launch)), env)

    def _arguments(self, launch: Launch) -> tuple[str, ...]:
        sglang = self.config.sglang
        options: dict[str, str | int] = {
            "--passport-path": str(launch.passport_path),
            "--model-path": launch.model,
            "--served-model-name": launch.model_name,
            "--host": launch.host.strip("[]"),
            "--port": launch.port,
            "--dtype": sglang.dtype,
            "--page-size": sglang.page_tokens,
        }
        numbers = {"--context-length": sglang.max_model_len, "--max-running-requests": sglang.max_num_seqs}
        options |= {name: value for name, value in numbers.items() if value}
        if sglang.hicache and self.config.connector.enabled:
            own = {
                "mooncache.state_dir": str(launch.state_dir),
                "mooncache.master_targets": ",".join(self.config.cluster.master_targets),
            }
            options |= {
                "--hicache-mem-layout": "page_first",
                "--hicache-storage-backend": "dynamic",
                "--hicache-storage-backend-extra-config": json.dumps(HICACHE | own),
            }
        if launch.events_endpoint:
            options["--kv-events-config"] = json.dumps(
                {
                    "publisher": "zmq",
                    "endpoint": launch.events_endpoint,
                    "replay_endpoint": launch.replay_endpoint,
                }
            )
        if launch.tls_cert is not None and launch.tls_key is not None:
            options |= {"--ssl-certfile": str(launch.tls_cert), "--ssl-keyfile": str(launch.tls_key)}
        arguments = [part for name, value in options.items() for part in (name, str(value))]
        arguments += ["--enable-metrics", "--enable-cache-report"]
        if "--hicache-storage-backend" in options:
            arguments.append("--enable-hierarchical-cache")
        return (*arguments, *sglang.extra_args)
