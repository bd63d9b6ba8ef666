"""What an upgrade to another version would meet: which processes, in which order, and what would not fit.

Pure: everything is handed in as it was seen. The version that asks is the one to which the cluster goes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mooncache.cluster.processes import ServiceKind
from mooncache.runtime.formats import (
    CONTROL_MINOR,
    CONTROL_MINOR_AHEAD_MAX,
    DATA_PLANE,
    DISK,
    KEPT_MEMORY,
)
from mooncache.topology.core.findings import BAD, OK, WARN, Finding

_RELEASE: Final = re.compile(r"(\d{1,9})\.(\d{1,9})")
_ORDER: Final = (
    ServiceKind.MASTER,  # takes nodes that are one control version ahead, and no more
    ServiceKind.STORE_NODE,  # refuses proofs that it does not know, so it knows them before anybody shows them
    ServiceKind.WORKER,
    ServiceKind.CONDUCTOR,
    ServiceKind.GATEWAY,  # the first that makes something new for the others to understand
)


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process of the cluster as it answered.

    Attributes:
        version: its own; "" when it did not say.
        formats: what a store node speaks and leaves to its next process; empty when it did not say.
        here: `mooncache up` on this machine started it.
        settings_problem: what the version that asks says of its settings; "" when it takes them.
        roles: of an engine: what it can do for requests of `model`.
    """

    name: str
    kind: ServiceKind
    version: str
    formats: Mapping[str, int] = field(default_factory=dict)
    here: bool = True
    settings_problem: str = ""
    model: str = ""
    generates: bool = False


class Release(NamedTuple):
    """The numbers of a version that say what fits to what."""

    major: int
    minor: int


def release_of(version: str) -> Release | None:
    """The numbers at the beginning of a version; None when there are none."""
    match = _RELEASE.match(version)
    return Release(int(match[1]), int(match[2])) if match else None


def in_order(processes: Sequence[RunningProcess], target: str) -> list[RunningProcess]:
    """Those that have another version than the target, in the order in which to restart them.

    On the way back the order is reversed: what makes something new goes before what has to understand it.
    """
    chosen = [process for process in processes if process.version != target]
    wanted = release_of(target)
    ahead = [release for process in chosen if (release := release_of(process.version)) is not None]
    back = wanted is not None and bool(ahead) and max(ahead) > wanted
    return sorted(chosen, key=lambda process: (_ORDER.index(process.kind), process.name), reverse=back)


def check(processes: Sequence[RunningProcess], target: str, formats: Mapping[str, int]) -> list[Finding]:
    """What the upgrade would meet, the worst not first but each under what it is about."""
    found = [*_versions(processes, target)]
    for process in processes:
        if process.kind == ServiceKind.STORE_NODE:
            found += _node(process, formats)
        if process.settings_problem:
            text = f"{process.name}: {process.settings_problem}"
            found.append(
                Finding(BAD, "settings", text, "change it before the upgrade; the process would not start")
            )
    if all(not process.settings_problem for process in processes) and any(item.here for item in processes):
        found.append(
            Finding(OK, "settings", f"version {target} takes those of every process on this machine")
        )
    return [*found, *_only_ones(processes, target), *_elsewhere(processes, target)]


def _versions(processes: Sequence[RunningProcess], target: str) -> list[Finding]:
    wanted, found = release_of(target), []
    for process in processes:
        release = release_of(process.version)
        if release is None:
            text = f"{process.name} does not say which version it has"
            found.append(Finding(WARN, "versions", text, "see that it runs: `mooncache status`"))
        elif wanted is not None and (release.major != wanted.major or abs(release.minor - wanted.minor) > 1):
            text = f"{process.name} has {process.version}; {target} is more than one minor version from it"
            found.append(Finding(BAD, "versions", text, "upgrade by one minor version at a time"))
    if found:
        return found
    order = in_order(processes, target)
    if not order:
        return [Finding(OK, "versions", f"all {len(processes)} processes have {target} already")]
    versions = sorted({process.version for process in order})
    return [Finding(OK, "versions", f"{len(order)} of {len(processes)}: {', '.join(versions)} to {target}")]


def _node(node: RunningProcess, formats: Mapping[str, int]) -> list[Finding]:
    """Whether a node's peers, memory and disks fit to the other version."""
    if not node.formats:
        text = f"{node.name} does not say which formats it has (it has version {node.version or 'unknown'})"
        return [Finding(WARN, "formats", text, "compare the versions in docs/upgrades.md")]
    found = []
    theirs, ours = node.formats.get(DATA_PLANE, 0), formats[DATA_PLANE]
    if theirs != ours:
        text = f"{node.name} speaks data-plane version {theirs}, this version {ours}: neither reads from the other"
        found.append(Finding(BAD, "data plane", text, "stop the whole cluster for this upgrade"))
    theirs, ours = node.formats.get(CONTROL_MINOR, 0), formats[CONTROL_MINOR]
    if abs(theirs - ours) > CONTROL_MINOR_AHEAD_MAX:
        text = f"{node.name} speaks control version {theirs}, this version {ours}"
        found.append(Finding(BAD, "control calls", text, "upgrade by one minor version at a time"))
    theirs, ours = node.formats.get(DISK, 0), formats[DISK]
    if theirs not in (0, ours):
        text = (
            f"the disk of {node.name} has format {theirs}, this version has {ours}: the node would not start"
        )
        found.append(Finding(BAD, "disks", text, "drain the node, then give it an empty file or device"))
    theirs, ours = node.formats.get(KEPT_MEMORY, 0), formats[KEPT_MEMORY]
    if theirs == 0:
        text = f"the blocks in memory of {node.name} end with its process"
        advice = "start nodes with --keep-memory, or drain each before its restart"
        found.append(Finding(WARN, "kept memory", text, advice))
    elif theirs != ours:
        text = f"the kept memory of {node.name} has layout {theirs}, this version has {ours}: it starts empty"
        found.append(Finding(WARN, "kept memory", text, "drain the node before its restart"))
    return found or [Finding(OK, "formats", f"{node.name}: peers, memory and disks fit")]


def _only_ones(processes: Sequence[RunningProcess], target: str) -> list[Finding]:
    """Engines without which no request for their model is answered while they start again."""
    found = []
    engines = [process for process in processes if process.kind == ServiceKind.WORKER and process.generates]
    for engine in engines:
        others = [item for item in engines if item.model == engine.model and item.name != engine.name]
        if not others and engine.version != target:
            text = f"{engine.name} is the only engine that generates for {engine.model}: requests fail while it starts"
            found.append(Finding(WARN, "engines", text, "start a second one, or choose a quiet moment"))
    return found


def _elsewhere(processes: Sequence[RunningProcess], target: str) -> list[Finding]:
    names = [process.name for process in in_order(processes, target) if not process.here]
    if not names:
        return []
    text = f"not started by `mooncache up` on this machine: {', '.join(names)}"
    return [Finding(WARN, "elsewhere", text, "restart them with what started them, in the order below")]
