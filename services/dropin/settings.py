"""What `setup` was asked for, and what of it has a meaning here. Pure: the environment is passed in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DEFAULT_BYTES: Final = 16 << 20  # of both sizes, when setup gets a dictionary that names none
DEFAULT_TENANT: Final = "default"
_DEFAULT_MASTER: Final = "127.0.0.1:50051"
_PROTOCOLS: Final = frozenset({"", "tcp", "rdma", "efa"})
_SIZE: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

INSTEAD: Final[dict[str, str]] = {
    "MC_FORCE_TCP": "set MOONCACHE_RDMA_ENABLED=false",
    "MC_GID_INDEX": "set MOONCACHE_RDMA_GID_INDEX",
    "MC_IB_SL": "set MOONCACHE_RDMA_SERVICE_LEVEL",
    "MC_IB_TC": "set MOONCACHE_RDMA_TRAFFIC_CLASS",
    "MC_LOG_LEVEL": "set MOONCACHE_LOGGING_LEVEL",
    "MC_MS_FILTERS": "set MOONCACHE_RDMA_DEVICES",
    "MC_RPC_TIMEOUT_MS": "set MOONCACHE_CLIENT_TIMEOUT_S",
    "MC_STORE_MEMCPY": "nodes on the same host are used through shared memory anyway",
    "MC_TE_FILTERS": "set MOONCACHE_RDMA_DEVICES",
    "MC_TRANSFER_TIMEOUT": "set MOONCACHE_CLIENT_TIMEOUT_S",
    "MOONCAKE_STORE_CHECKSUM": "checksums are always compared",
}
"""Variables of the original that have a counterpart here: name -> what to do."""
_READ_BY_CALLERS: Final = frozenset(
    {
        "MOONCAKE_CONFIG_PATH",
        "MOONCAKE_DEVICE",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE",
        "MOONCAKE_LOCAL_BUFFER_SIZE",
        "MOONCAKE_LOCAL_HOSTNAME",
        "MOONCAKE_MASTER",
        "MOONCAKE_PROTOCOL",
        "MOONCAKE_TE_META_DATA_SERVER",
        "MOONCAKE_TENANT_ID",
    }
)  # integrations read them and pass their values to setup


class SetupRefusedError(Exception):
    """`setup` asks for something that cannot be had; the text says why."""


@dataclass(frozen=True, slots=True)
class SetupSettings:
    """A checked `setup`."""

    host: str
    port: int
    """0: any free one."""
    segment_bytes: int
    master: str
    """Empty: as for every client of this machine."""
    tenant: str | None
    """None: the token's."""
    ignored: tuple[str, ...] = ()
    """Sentences about arguments that have no effect."""


def size_of(name: str, value: Any) -> int:
    """Bytes of a size: an int, or a text such as "4 GB" (of 1024-based units). Raises SetupRefusedError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise SetupRefusedError(f"{name} is a number of bytes, such as 16777216 or '16MB'; got {value!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and "]" not in port and (host.startswith("[") or ":" not in host):
        if not 0 <= int(port) < 65_536:
            raise SetupRefusedError(f"local_hostname has no port {port}")
        return host.strip("[]") or "localhost", int(port)
    return text.strip("[]") or "localhost", 0


def _flag(value: Any) -> bool:
    return value.strip().lower() in {"1", "true", "yes", "on"} if isinstance(value, str) else bool(value)


def checked(asked: Mapping[str, Any]) -> SetupSettings:
    """The settings of a `setup`, from its arguments by the original's names. Raises SetupRefusedError."""
    host, port = _host_and_port(str(asked.get("local_hostname") or "localhost"))
    protocol = str(asked.get("protocol", "tcp"))
    if not set(protocol.lower().replace(" ", "").split(",")) <= _PROTOCOLS:
        raise SetupRefusedError(
            f"protocol {protocol!r} is not offered; shared memory, RDMA and TCP are chosen by themselves"
        )
    master = str(asked.get("master_server_addr", asked.get("master_server_address", _DEFAULT_MASTER)) or "")
    if "://" in master:
        raise SetupRefusedError(
            f"master {master!r}: give host:port of the masters, several with commas in between"
        )
    tenant = str(asked.get("tenant_id") or DEFAULT_TENANT)
    ignored = []
    if _flag(asked.get("enable_ssd_offload")) or asked.get("ssd_offload_path"):
        ignored.append("enable_ssd_offload: disks belong to store nodes (store_node.ssd_bytes)")
    if _flag(asked.get("enable_client_http_server")):
        ignored.append("enable_client_http_server: nodes and the master serve metrics and health")
    if asked.get("engine") is not None:
        ignored.append("engine: the client has transports of its own")
    if asked.get("rdma_devices") and "rdma" in protocol:
        ignored.append("rdma_devices: every active port is used, or MOONCACHE_RDMA_DEVICES")
    return SetupSettings(
        host=host,
        port=port,
        segment_bytes=size_of("global_segment_size", asked.get("global_segment_size", DEFAULT_BYTES)),
        master=master,
        tenant=None if tenant == DEFAULT_TENANT else tenant,
        ignored=(*ignored, *_local_buffer(asked)),
    )


def _local_buffer(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Its size is checked, as the original does; nothing is staged in it here."""
    size_of("local_buffer_size", asked.get("local_buffer_size", DEFAULT_BYTES))
    return ()


def foreign_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Set variables of the original that have no effect here: name -> what to do instead."""
    return {
        name: INSTEAD.get(name, "has no counterpart here")
        for name in sorted(environment)
        if name.startswith(("MC_", "MOONCAKE_")) and name not in _READ_BY_CALLERS
    }
