"""Which processes a one-machine cluster has, and the environment of each.

The services are the same as anywhere else; all that is special here is that this module writes their settings. What
the user has set (file or environment) wins over what is chosen here for engines, because both are about one machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import RUN_VARIABLE, Part, ServiceKind
from mooncache.cluster.settings import (
    CONDUCTOR_PORT,
    GATEWAY_PORT,
    MASTER_PORT,
    ClusterRole,
    ClusterSettings,
    gpu_count,
)
from mooncache.config import Config, explain
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.runtime.ports import host_in_url

_BLOCK_TOKENS = 32
_GPU_SHARE = 0.85
USUAL_LEVEL = "info"
HOLDER_SOCKET = "holder.sock"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - compared, not bound


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The parts in the order in which they start, and the addresses by which they find each other."""

    parts: dict[str, Part]
    master_target: str
    conductor_target: str
    gateway_url: str


def is_worker(part: Part) -> bool:
    """Whether the part supervises an engine."""
    return part.service == ServiceKind.WORKER


def plan(
    settings: ClusterSettings, config: Config, state_dir: Path, run_dir: Path, run_id: str, ports: PortPicker
) -> ClusterLayout:
    """Choose the ports and make each part's environment. Raises ConfigInvalid for a port that cannot be used."""
    return _Planner(settings, config, state_dir, run_dir, run_id, ports).layout()


class _Planner:
    def __init__(
        self,
        settings: ClusterSettings,
        config: Config,
        state_dir: Path,
        run_dir: Path,
        run_id: str,
        ports: PortPicker,
    ) -> None:
        self._settings, self._state_dir, self._run_dir, self._ports = settings, state_dir, run_dir, ports
        self._spares = config.cluster.spare_processes
        self._chosen = {row.name for row in explain(config) if not row.is_default}
        self._accounts: dict[str, str] = {}  # may have a password, so no other process gets it
        place = config.cluster.accounts_dir
        if "cluster.accounts_dir" in self._chosen and place is not None:
            text = str(place) if isinstance(place, Path) else place.secret_text
            self._accounts["MOONCACHE_CLUSTER_ACCOUNTS_DIR"] = text
        self._scheme = "https" if config.tls.enabled else "http"
        self._probe_host = _reachable(config.metrics.host) if config.metrics.enabled else ""
        host = host_in_url(settings.host)
        self._conductors: list[str] = []
        self._gateway = ""
        if settings.roles:
            self._master = ",".join(config.cluster.master_targets)
            self._conductors = [each for each in config.cluster.conductor_target.split(",") if each]
        else:
            self._master = f"{host}:{ports.pick(settings.port, MASTER_PORT, '--master-port')}"
            if settings.serves:
                port = ports.pick(settings.conductor_port, CONDUCTOR_PORT, "--conductor-port")
                more = [ports.any() for _ in range(1, settings.conductors)]
                self._conductors = [f"{host}:{each}" for each in (port, *more)]
        if settings.runs(ClusterRole.GATEWAY):
            self._gateway = f"{host}:{ports.pick(settings.gateway_port, GATEWAY_PORT, '--port')}"
        self._common = {
            "MOONCACHE_CLUSTER_STATE_DIR": str(state_dir),
            "MOONCACHE_CLUSTER_MASTER_TARGETS": self._master,
            "MOONCACHE_LOGGING_FORMAT": "json",
            RUN_VARIABLE: run_id,
        }
        if (
            settings.log_level != USUAL_LEVEL
        ):  # else it is the configuration's, which may change while all runs
            self._common["MOONCACHE_LOGGING_LEVEL"] = settings.log_level
        if "cluster.token_file" in self._chosen and config.cluster.token_file is not None:
            self._common["MOONCACHE_CLUSTER_TOKEN_FILE"] = str(config.cluster.token_file)
        if self._conductors:
            self._common["MOONCACHE_CLUSTER_CONDUCTOR_TARGET"] = self._conductor_target

    def layout(self) -> ClusterLayout:
        settings = self._settings
        parts = []
        if not settings.roles:
            parts.append(self._part("master", ServiceKind.MASTER, self._master, {}))
        if settings.runs(ClusterRole.STORE):
            parts += [self._node(number) for number in range(1, settings.node_count + 1)]
        if settings.serves and not settings.roles:
            for number, target in enumerate(self._conductors, 1):
                name = "conductor" if number == 1 else f"conductor-{number}"
                parts.append(self._part(name, ServiceKind.CONDUCTOR, target, self._patience()))
        if settings.runs(ClusterRole.GATEWAY):
            more = {"DRAIN_TIMEOUT_S": "3"}  # Ctrl-C on a laptop should not take half a minute
            if "gateway.batch_dir" not in self._chosen:
                more["BATCH_DIR"] = str(self._state_dir / "batches")
            if settings.model and "gateway.model_folders" not in self._chosen:
                more["MODEL_FOLDERS"] = settings.model
            gateway = self._part("gateway", ServiceKind.GATEWAY, self._gateway, more)
            parts.append(replace(gateway, env={**gateway.env, **self._accounts}))
        if settings.runs(ClusterRole.ENGINE):
            parts += self._workers()
        url = f"{self._scheme}://{self._gateway}" if self._gateway else ""
        return ClusterLayout({part.name: part for part in parts}, self._master, self._conductor_target, url)

    @property
    def _conductor_target(self) -> str:
        """All conductors, as in `cluster.conductor_target`; "" without one."""
        return ",".join(self._conductors)

    def _own(self, name: str) -> str:
        """A name that no other machine's part has: with the host in front where the cluster has several."""
        return f"{self._settings.host.replace(':', '_')}-{name}" if self._settings.roles else name

    def _patience(self) -> dict[str, str]:
        """Engines that load or compute keep all processors busy: a worker or conductor that is late is not gone."""
        longer = {"SUSPECT_AFTER_S": "6", "LEASE_S": "20", "TAKEOVER_S": "3"}
        return {
            name: value for name, value in longer.items() if f"conductor.{name.lower()}" not in self._chosen
        }

    def _part(self, name: str, service: ServiceKind, control: str, more: dict[str, str]) -> Part:
        host = self._settings.host
        own = {"HOST": host, "PORT": control.rpartition(":")[2], **more}
        metrics = ""
        if self._probe_host:
            metrics = f"{self._probe_host}:{self._ports.any()}"
            own["METRICS_PORT"] = metrics.rpartition(":")[2]
        env = {f"MOONCACHE_{service}_{field}".upper(): value for field, value in own.items()}
        log = self._state_dir / "logs" / f"{name}.log"
        extra = dict(self._settings.extra_env)
        return Part(name, service, {**self._common, **extra, **env}, log, control, metrics)

    def _node(self, number: int) -> Part:
        name, host = self._own(f"node-{number}"), self._settings.host
        more = {
            "NODE_ID": name,
            "DATA_HOST": host,
            "CAPACITY_BYTES": str(self._settings.capacity_bytes),
            "UNIX_PATH": str(self._run_dir / f"node-{number}.sock"),
        }
        if self._settings.ssd_bytes:
            more["SSD_BYTES"] = str(self._settings.ssd_bytes)
        if self._settings.shared_path is not None:
            more["SHARED_PATH"] = str(self._settings.shared_path.absolute())
        if self._settings.shared_url:
            more["SHARED_URL"] = self._settings.shared_url
        if self._settings.keep_memory:
            more["KEEP_MEMORY"] = "true"
            more["HOLDER_PATH"] = str(self._run_dir / HOLDER_SOCKET)
        part = self._part(name, ServiceKind.STORE_NODE, f"{host_in_url(host)}:{self._ports.any()}", more)
        part.keeps_spare = self._settings.keep_memory and self._spares
        return part

    def _workers(self) -> list[Part]:
        settings = self._settings
        generates = InstanceRole.DECODE if settings.prefill else InstanceRole.BOTH
        roles = {f"prefill-{number}": InstanceRole.PREFILL for number in range(1, settings.prefill + 1)}
        roles |= {f"decode-{number}": generates for number in range(1, settings.decode + 1)}
        return [
            self._worker(self._own(name), role, index, len(roles))
            for index, (name, role) in enumerate(roles.items())
        ]

    def _worker(self, name: str, role: InstanceRole, index: int, count: int) -> Part:
        settings = self._settings
        more = {
            "INSTANCE_ID": name,
            "ROLE": role,
            "ENGINE": settings.engine,
            "MODEL": settings.model,
            "MODEL_NAME": settings.model_name,
            "DRAIN_TIMEOUT_S": "1",
        }
        if settings.host not in _EVERYWHERE:
            more["ENGINE_HOST"] = settings.host  # gateways of other machines reach it there
        part = self._part(name, ServiceKind.WORKER, f"{host_in_url(settings.host)}:{self._ports.any()}", more)
        part.env = {**self._engine_env(index, count), **part.env}
        return part

    def _engine_env(self, index: int, count: int) -> dict[str, str]:
        """Choices for engines that share one machine; only where the user has not chosen."""
        gpus = gpu_count()
        chosen: dict[str, str] = {}
        env: dict[str, str] = {}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = _nth_gpu(index % gpus)
            share = _GPU_SHARE / -(-count // gpus)
            chosen["vllm.extra_args"] = f"--gpu-memory-utilization,{share:.2f}"
        else:
            # Small blocks and no compiling: a quick start and hits on short prompts. float32: equal tokens.
            chosen = {
                "vllm.dtype": "float32",
                "vllm.enforce_eager": "true",
                "vllm.block_tokens": str(_BLOCK_TOKENS),
            }
            if "OMP_NUM_THREADS" not in os.environ:
                # Threads that share a core with another engine's wait for each other in busy loops.
                env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // count))
        for name, value in chosen.items():
            if name not in self._chosen:
                env["MOONCACHE_" + name.replace(".", "_").upper()] = value
        return env


def _nth_gpu(index: int) -> str:
    visible = [item.strip() for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip()]
    return visible[index] if visible else str(index)


def _reachable(host: str) -> str:
    """The host by which this machine itself reaches a server that listens on `host`."""
    return _EVERYWHERE.get(host, host_in_url(host))
