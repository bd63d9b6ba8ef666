"""vLLM: `vllm serve` with our connector and its cache events on sockets that only this user can reach."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import ClassVar

from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.kvcache.kv_types import why_garbage
from mooncache.kvcache.pool_link import INSTANCE_VARIABLE
from mooncache.runtime import otlp
from mooncache.worker.adapters.base import (
    Command,
    EngineAdapter,
    Launch,
    option,
    ranks_without_events,
    section_env,
)
from mooncache.worker.core.facts import EngineFacts, digits, merged
from mooncache.worker.core.load import MetricNames

CONNECTOR = "MooncacheConnector"
CONNECTOR_MODULE = "mooncache.connectors.vllm"
GUARD = "mooncache.runtime.engine_guard.EngineGuard"
NO_DOMAIN = "none.invalid"
"""A name that no URL can have: `.invalid` is reserved, so that it is never owned."""
_SCHEDULING = "--scheduling-policy"
_DATA_PARALLEL = ("--data-parallel-size", "-dp")
_DATA_PARALLEL_HERE = ("--data-parallel-size-local", "-dpl")
_OTHERS_BESIDE = frozenset(
    {
        "--data-parallel-rank",
        "-dpn",
        "--data-parallel-external-lb",
        "-dpe",
        "--data-parallel-hybrid-lb",
        "-dph",
    }
)
_BY_PRIORITY = "priority"
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
_FEW_CORES = 4


class VllmAdapter(EngineAdapter):
    """The adapter of vLLM; its settings are the sections vllm and connector."""

    name: ClassVar[str] = "vllm"
    kv_events: ClassVar[bool] = True
    metrics: ClassVar[MetricNames] = MetricNames(
        waiting=("vllm:num_requests_waiting",),
        running=("vllm:num_requests_running",),
        kv_usage=("vllm:kv_cache_usage_perc",),
        ttft=("vllm:time_to_first_token_seconds",),
        tbt=("vllm:inter_token_latency_seconds",),
        prompt_tokens=("vllm:prompt_tokens_total",),
        prompt_tokens_cached=("vllm:prompt_tokens_cached_total",),
        output_tokens=("vllm:generation_tokens_total",),
        local_hit_tokens=("vllm:prefix_cache_hits_total",),
        pool_hit_tokens=("vllm:external_prefix_cache_hits_total",),
    )

    def facts(self, models: object, info: object, page: str) -> EngineFacts:
        known = EngineFacts(
            stages=self._size("--pipeline-parallel-size", "-pp"),
            ranks=self._size("--tensor-parallel-size", "-tp")
            * max(1, self._size("--prefill-context-parallel-size", "-pcp")),
            replicas=self._size(*(_DATA_PARALLEL_HERE if self._is_one_of_many else _DATA_PARALLEL)),
        )
        return merged(super().facts(models, info, page), known)

    @property
    def _is_one_of_many(self) -> bool:
        """Whether its command line counts data parallel ranks that are engines, and instances, of their own."""
        arguments = self.config.vllm.extra_args
        return any(word.partition("=")[0].replace("_", "-") in _OTHERS_BESIDE for word in arguments)

    def _size(self, *names: str) -> int:
        """A number of processes by the command line; 0: not known, because the engine was started elsewhere."""
        said = (digits(option(self.config.vllm.extra_args, name)) for name in names)
        return next(filter(None, said), 0 if self.config.worker.attach_url else 1)

    @property
    def publishes_events(self) -> bool:
        return self.config.vllm.kv_events and not self.why_no_events

    @property
    def why_no_events(self) -> str:
        if not self.config.vllm.kv_events:
            return ""
        return ranks_without_events(self.config.vllm.extra_args, "--data-parallel-size", "-dp")

    @property
    def max_sequences(self) -> int:
        return self.config.vllm.max_num_seqs

    @property
    def orders_by_priority(self) -> bool:
        said = option(self.config.vllm.extra_args, _SCHEDULING)
        if said:
            return said == _BY_PRIORITY
        # One that was started elsewhere got nothing of `_arguments`, and vLLM's own default is another one.
        return not self.config.worker.attach_url

    def command(self, launch: Launch) -> Command:
        problem = why_refused(self.config)
        if problem:
            raise ConfigInvalid(problem)
        return Command(self._arguments(launch), self._env(launch))

    def _arguments(self, launch: Launch) -> tuple[str, ...]:
        vllm = self.config.vllm
        arguments = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", launch.model]
        options: dict[str, str | int] = {
            "--served-model-name": launch.model_name,
            "--host": launch.host,
            "--port": launch.port,
            "--dtype": vllm.dtype,
            # Hashes that do not depend on Python's pickling, so that they mean the same in every process.
            "--prefix-caching-hash-algo": "sha256_cbor",
            # The worker asks for these again and again.
            "--disable-access-log-for-endpoints": "/health,/metrics",
            # vLLM itself asks for the key on some paths only.
            "--middleware": GUARD,
            # Its queue is by the places that gateways name. What `extra_args` say comes later and counts.
            _SCHEDULING: _BY_PRIORITY,
        }
        numbers = {
            "--max-model-len": vllm.max_model_len,
            "--block-size": vllm.block_tokens,
            "--max-num-seqs": vllm.max_num_seqs,
        }
        options |= {name: value for name, value in numbers.items() if value}
        if self.config.connector.enabled:
            options["--kv-transfer-config"] = json.dumps(self._connector(launch))
        if launch.events_endpoint:
            options["--kv-events-config"] = json.dumps(
                {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": launch.events_endpoint,
                    "replay_endpoint": launch.replay_endpoint,
                }
            )
        if self.config.tracing.endpoint:
            address = otlp.url_of(self.config.tracing.endpoint, "traces")
            options["--otlp-traces-endpoint"] = address  # it reads traceparent by itself
        if launch.tls_cert is not None and launch.tls_key is not None:
            options |= {"--ssl-certfile": str(launch.tls_cert), "--ssl-keyfile": str(launch.tls_key)}
        if vllm.tool_parser:
            options["--tool-call-parser"] = vllm.tool_parser
        for name, value in options.items():
            arguments += [name, str(value)]
        arguments += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        # One value for each, and at least one: vLLM takes an empty list for "any host".
        arguments += ["--allowed-media-domains", *(vllm.media_domains or (NO_DOMAIN,))]
        if vllm.tool_parser:
            arguments.append("--enable-auto-tool-choice")
        if vllm.enforce_eager:
            arguments.append("--enforce-eager")
        return (*arguments, *vllm.extra_args)

    def _connector(self, launch: Launch) -> dict[str, object]:
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "mooncache.passport_path": str(launch.passport_path),
                "mooncache.state_dir": str(launch.state_dir),
                "mooncache.master_targets": ",".join(self.config.cluster.master_targets),
                # The server takes it and tells the engine nothing; gateways have to know whether theirs differs.
                "mooncache.chat_template": option(self.config.vllm.extra_args, "--chat-template"),
            },
        }

    def _env(self, launch: Launch) -> dict[str, str | None]:
        env = section_env(self.config, ("cluster", "connector", "tls", "logging", "tracing"))
        env |= {"VLLM_API_KEY": launch.engine_key, "VLLM_NO_USAGE_STATS": "1"}
        env[INSTANCE_VARIABLE] = launch.instance_id
        # A host that is allowed must not send vLLM on to one that is not.
        env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = os.environ.get("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        if self.config.tracing.endpoint:
            env["OTEL_SERVICE_NAME"] = "mooncache-engine"
            env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = otlp.protocol_of(self.config.tracing.endpoint)
        if Path(launch.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        return env | processor_env(self.config.vllm.kv_cache_bytes)


def processor_env(kv_cache_bytes: int) -> dict[str, str]:
    """What vLLM needs in its environment where it computes on a CPU; nothing where there is a GPU.

    Args:
        kv_cache_bytes: memory for its cache; 0 leaves what the environment says, or takes 1 GiB.
    """
    if has_gpu():
        return {}
    env: dict[str, str] = {}
    # Without a number vLLM takes most of the memory of the machine.
    if kv_cache_bytes or "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, kv_cache_bytes >> 30))
    threads = os.environ.get("OMP_NUM_THREADS", "1" if (os.cpu_count() or 1) < _FEW_CORES else "")
    if threads:
        # Threads that have to share a core wait for each other in busy loops. Engines that each bind theirs
        # to the first cores would do just that.
        env["OMP_NUM_THREADS"] = threads
        env["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if threads == "1":
        # vLLM computes in a process of its own on CPUs, to bind its threads; scheduler and worker then wait for
        # each other in busy loops, which take the cores from engines that compute. One thread needs no binding.
        name = "VLLM_ENABLE_V1_MULTIPROCESSING"
        env[name] = os.environ.get(name, "0")
    return env


def why_refused(config: Config) -> str:
    """Why vLLM, as configured here, would answer garbage; "" when nothing is known against it."""
    arguments = config.vllm.extra_args
    model_type = option(arguments, "--dtype") or config.vllm.dtype
    return why_garbage(option(arguments, "--kv-cache-dtype"), model_type, cpu=not has_gpu())


def has_gpu() -> bool:
    """Whether this machine has a GPU that vLLM could use."""
    return any(os.path.exists(path) for path in _GPU_DEVICES)
