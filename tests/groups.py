"""Folders whose tests share something costly: a cluster, a virtual machine, containers.

With several workers (pytest -n) a file runs whole in one of them, and files of a group share one worker. What a group
started ends with its last test, because idle engines take processor time from all tests that come later.
"""

from __future__ import annotations

from collections.abc import Callable

# The longest begin first.
GROUPS = ("chaos", "serving", "openai_client", "connectors", "rdma", "deploy", "cluster", "hf_engine")
_stops: dict[str, list[Callable[[], object]]] = {}


def group_of(nodeid: str) -> str:
    """The folder when it is a group, else the file."""
    file = nodeid.split("::", maxsplit=1)[0]
    folder = file.removeprefix("tests/").split("/")[0]
    return folder if folder in GROUPS else file


def stop_after(group: str, stop: Callable[[], object]) -> None:
    """Call `stop` after the last test of the group. A session fixture may call it once more at the very end."""
    assert group in GROUPS, group
    _stops.setdefault(group, []).append(stop)


def end(group: str) -> None:
    """The last test of the group is over."""
    for stop in reversed(_stops.pop(group, [])):
        stop()
