"""The state folder's `cluster.json`: what runs on this machine, so that clients here need no arguments."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooncache.errors import ConfigInvalid
from mooncache.whole_file import AS_UMASK_SAYS, write_whole

CLUSTER_FILE = "cluster.json"
_FILE_BYTES_MAX = 1 << 20
_VERSION = 1


@dataclass(frozen=True, slots=True)
class PartView:
    """What the supervisor of `mooncache up` says of one process."""

    name: str
    pid: int
    state: str = "ready"
    """ready, starting, down (waiting for its next start) or given_up."""
    restarts: int = 0
    reason: str = ""
    """Why it is not well; empty when it is."""
    last_end: str = ""
    """How it ended the last time, like "signal SIGKILL"; empty when it never did."""


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """What `mooncache up` wrote about the running cluster."""

    master_targets: tuple[str, ...]
    pid: int
    tls_ca: str | None = None
    conductor_target: str = ""
    """host:port; empty when the cluster is a pool alone."""
    gateway_url: str = ""
    """http://host:port; empty when the cluster is a pool alone."""
    metrics: dict[str, str] = field(default_factory=dict)
    """Name of a part -> host:port of its probe server."""
    run_id: str = ""
    """Carried by every process of this run in its environment."""
    holder: str = ""
    """Socket of the process that holds the memory of the nodes; empty when none does."""
    ready: bool = True
    parts: tuple[PartView, ...] = ()
    """The processes, in the order in which they start."""


def read_cluster_file(folder: Path) -> ClusterFile | None:
    """The running cluster of this machine; None when no file is there.

    Raises:
        ConfigInvalid: the file is there and makes no sense.
    """
    path = folder / CLUSTER_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error.strerror}.") from None
    try:
        content = json.loads(data)
        targets = tuple(str(target) for target in content["master_targets"])
        return ClusterFile(
            targets,
            int(content.get("pid", 0)),
            content.get("tls_ca"),
            str(content.get("conductor_target", "")),
            str(content.get("gateway_url", "")),
            {str(name): str(address) for name, address in content.get("metrics", {}).items()},
            str(content.get("run_id", "")),
            str(content.get("holder", "")),
            bool(content.get("ready", True)),
            tuple(_part(name, pid, content) for name, pid in content.get("parts", {}).items()),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigInvalid(
            f"{path} is damaged ({type(error).__name__}). Delete it; `mooncache up` writes it again."
        ) from None


def _part(name: str, pid: Any, content: dict[str, Any]) -> PartView:
    record = content.get("records", {}).get(name, {})
    return PartView(
        str(name),
        int(pid),
        str(record.get("state", "ready")),
        int(record.get("restarts", 0)),
        str(record.get("reason", "")),
        str(record.get("last_end", "")),
    )


def write_cluster_file(folder: Path, content: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps({"version": _VERSION, **content}, indent=2) + "\n"
    write_whole(folder / CLUSTER_FILE, text, mode=AS_UMASK_SAYS)


def remove_cluster_file(folder: Path, pid: int) -> None:
    """Remove the file when it is the one that process `pid` wrote."""
    with contextlib.suppress(ConfigInvalid, OSError):
        found = read_cluster_file(folder)
        if found is not None and found.pid == pid:
            (folder / CLUSTER_FILE).unlink()
