"""What a node's configuration means for its native server and for the master: sizes, folders, limits, its name."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncache.config import Config
from mooncache.config.pool import StoreNodeSection
from mooncache.errors import ConfigInvalid
from mooncache.runtime.formats import CONTROL_MINOR, DATA_PLANE, DISK, FORMATS, KEPT_MEMORY
from mooncache.runtime.ports import UNIX_PATH_MAX
from mooncache.store_node.arena_kind import ArenaKind
from mooncache.store_node.host_memory import memory_left_bytes
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.write_budget import write_bytes_per_s

if TYPE_CHECKING:
    from mooncache.proto.v1 import common_pb2

_NODE_ID_FILE = "node.id"
_HANDSHAKE_TIMEOUT_MS = 5_000
_IDLE_TIMEOUT_MS = 300_000
_GRANT_TIMEOUT_MS = 30_000  # clients that hold reservations or pins send a PING every 5 s
_BLOCK_BYTES_MAX = 1 << 30
_INDEX_SHARDS = 64  # locked apart
_EVENTS_KEPT = 1 << 18  # more changes in one go lead to a full report
_MIN_CAPACITY_BYTES = 1 << 20


def formats_of(node: StoreNodeSection) -> dict[str, int]:
    """What another version has to fit to, by name: what the node speaks, and what it leaves to its next process."""
    used = [DATA_PLANE, CONTROL_MINOR]
    used += [KEPT_MEMORY] if node.keep_memory else []
    used += [DISK] if node.ssd_bytes or node.shared_path is not None or node.shared_url else []
    return {name: FORMATS[name] for name in used}


def wanted_bytes(node: StoreNodeSection) -> int:
    """The capacity to ask the native server for; 0 means all of `arena_path`.

    Raises:
        ConfigInvalid: it is too small, or nothing says how large a file in a folder shall be.
    """
    if node.arena_device and (node.arena_path is not None or not node.capacity_bytes):
        raise ConfigInvalid(
            "store_node.arena_device needs store_node.capacity_bytes (how much of the GPU's memory) and no arena_path."
        )
    if node.arena_path is not None and not node.capacity_bytes:
        if node.arena_path.is_dir():
            raise ConfigInvalid(
                f"store_node.arena_path is the folder {node.arena_path}. Set store_node.capacity_bytes too."
            )
        return 0
    wanted = node.capacity_bytes or quarter_of_memory_bytes()
    if wanted < _MIN_CAPACITY_BYTES:
        raise ConfigInvalid(f"store_node.capacity_bytes must be at least 1 MiB; it is {wanted}.")
    return wanted


def check_arena(arena: dict[str, Any]) -> None:
    """Only the native server knows how large a file or a device is, rounded down to the pages of its mapping.

    Raises:
        ConfigInvalid: too small to be of use.
    """
    if arena["size_bytes"] < _MIN_CAPACITY_BYTES:
        raise ConfigInvalid(
            f"The arena {arena['description']} has {arena['size_bytes']} bytes; it must have at least 1 MiB. "
            "Make the file larger (fallocate -l 64GiB), or set store_node.capacity_bytes."
        )


def segment_of(arena: dict[str, Any]) -> common_pb2.Segment:
    """What the native server says of its arena, as it is reported to the master."""
    from mooncache.proto.v1 import common_pb2  # not before memory is adopted (opening.py)

    tier = common_pb2.TIER_HBM if arena["kind"] == ArenaKind.GPU else common_pb2.TIER_DRAM
    return common_pb2.Segment(id=0, tier=tier, capacity_bytes=arena["size_bytes"], kind=arena["kind"])


def server_settings(
    config: Config, identity: NodeIdentity, capacity_bytes: int, secret: bytes
) -> dict[str, object]:
    """The native server's configuration."""
    node = config.store_node
    settings: dict[str, Any] = {
        "node_id": identity.node_id,
        "host_id": identity.host_id,
        "secret": secret,
        "incarnation": identity.incarnation,
        "capacity_bytes": capacity_bytes,
        "tcp_host": node.data_host,
        "tcp_port": node.data_port,
        "unix_path": unix_path(config, identity.node_id),
        "io_threads": node.io_threads,
        "idle_timeout_ms": _IDLE_TIMEOUT_MS,
        "grant_timeout_ms": _GRANT_TIMEOUT_MS,
        "handshake_timeout_ms": _HANDSHAKE_TIMEOUT_MS,
        "shards": _INDEX_SHARDS,
        "huge_pages": node.huge_pages,
        "numa_node": node.numa_node,
        "max_block_bytes": _BLOCK_BYTES_MAX,
        "expected_block_bytes": node.expected_block_bytes,
        "event_log_capacity": _EVENTS_KEPT,
        **config.rdma.native(),
    }
    if node.arena_device:
        settings["arena_gpu"] = int(node.arena_device.partition(":")[2])
    if node.ssd_bytes:
        settings["ssd_paths"] = ssd_paths(config, identity.node_id)
        settings["ssd_bytes"] = node.ssd_bytes
        settings["ssd_write_bytes_per_s"] = write_bytes_per_s(node, settings["ssd_paths"])
    if node.shared_path is not None or node.shared_url:
        folder = spool_folder(config, identity.node_id) if node.shared_url else node.shared_path
        settings["shared_path"] = str(folder)
        settings["shared_bytes"] = node.shared_bytes
        settings["shared_write_bytes_per_s"] = node.shared_write_bytes_per_s
        settings["shared_scan_ms"] = node.shared_scan_ms
    if node.shared_url:
        settings["shared_spool_bytes"] = node.shared_spool_bytes
        settings["shared_timeout_ms"] = round(node.shared_timeout_s * 1e3)
        settings["shared_upload_ms"] = round(node.shared_upload_s * 1e3)
    if node.arena_path is not None:
        settings["arena_path"] = str(node.arena_path)
    if node.eviction:
        settings["eviction"] = node.eviction
    if config.tls.enabled:
        settings["tls_cert"] = str(config.tls.cert_file or "")
        settings["tls_key"] = str(config.tls.key_file or "")
        if config.tls.require_client_cert:
            settings["tls_client_ca"] = str(config.tls.ca_file or "")
    return settings


def ssd_paths(config: Config, node_id: str) -> list[str]:
    """Where the SSD tier lies. Only the folder that is the node's own is made here: a disk that is not mounted must
    not become a folder on the disk above it.

    Raises:
        ConfigInvalid: the folder cannot be made.
    """
    if config.store_node.ssd_paths:
        return [os.path.expanduser(path) for path in config.store_node.ssd_paths]
    return [str(own_folder(config.cluster.state_dir / "ssd" / node_id))]


def spool_folder(config: Config, node_id: str) -> Path:
    """Where blocks wait for the object store.

    Raises:
        ConfigInvalid: there is a directory, too, or the folder cannot be made.
    """
    node = config.store_node
    if node.shared_path is not None:
        raise ConfigInvalid("store_node.shared_path and store_node.shared_url are both set. Choose one.")
    return own_folder(node.shared_spool_path or config.cluster.state_dir / "spool" / node_id)


def own_folder(folder: Path) -> Path:
    """The folder, made where it is missing.

    Raises:
        ConfigInvalid: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigInvalid(f"{folder} cannot be made: {error.strerror}.") from None
    return folder


def unix_path(config: Config, node_id: str) -> str:
    """Path of the data socket; empty when it is switched off.

    Raises:
        ConfigInvalid: the path is longer than the kernel allows for a socket.
    """
    node = config.store_node
    if not node.unix_enabled:
        return ""
    path = node.unix_path or config.cluster.state_dir / "run" / f"{node_id}.sock"
    if len(os.fsencode(path)) > UNIX_PATH_MAX:
        raise ConfigInvalid(
            f"The data socket's path is longer than {UNIX_PATH_MAX} bytes: {path}. "
            "Set store_node.unix_path to a shorter one, or store_node.unix_enabled to false."
        )
    return str(path)


def kept_node_id(folder: Path) -> str:
    """The node's name from the state folder, made up at the first start."""
    path = folder / _NODE_ID_FILE
    try:
        found = path.read_text(encoding="utf-8").strip()
        if found and len(found) <= 128:
            return found
        raise ConfigInvalid(f"{path} does not hold a node's name. Delete it to get a new one.")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error.strerror}.") from None
    name = f"node-{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(name + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be written: {error.strerror}.") from None
    return name


def quarter_of_memory_bytes() -> int:
    """A quarter of the memory that is left to this process now, in whole MiB."""
    return memory_left_bytes() // 4 >> 20 << 20
