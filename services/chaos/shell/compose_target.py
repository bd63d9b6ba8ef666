"""A Compose project on this machine: parts are its services, and processes are reached by the ids of the host.

A process that is killed this way looks to Docker like one that crashed, so the restart policy of the Compose file
starts it again; after `docker kill` it would not. The engine has to run on this machine: a process id is used only
when the kernel says that the process is in that container.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path, PurePosixPath
from typing import Final

from mooncache.auth import Token, metrics_key, parse_token_file
from mooncache.chaos.core.containers import PROJECT_LABEL, ContainerPart, read_parts
from mooncache.chaos.core.faults import Aim, aims_of
from mooncache.chaos.core.records import PoolTally
from mooncache.chaos.shell.container_load import ContainerLoad
from mooncache.chaos.shell.docker_command import docker
from mooncache.chaos.shell.processes import target_pid
from mooncache.cluster.http_get import http_get
from mooncache.cluster.pins import pins_held
from mooncache.cluster.watch import reason_of
from mooncache.errors import ConfigInvalid, MooncacheError, PermissionDenied

_PARTS_MAX: Final = 100
_PROJECTS_SHOWN: Final = 10
_AUTHORITY: Final = "MOONCACHE_TLS_CA_FILE"
_PORT: Final = "MOONCACHE_GATEWAY_PORT"
_HEALTHY: Final = ("healthy", "")


class ComposeTarget:
    """A `ChaosTarget`; `find` makes one."""

    def __init__(
        self, project: str, containers: dict[str, str], gateway_url: str, token: Token, authority: str
    ) -> None:
        self._containers = containers
        self.name = f"Compose project {project}"
        self.gateway_url, self.token = gateway_url, token
        self.tls = ssl.create_default_context(cadata=authority) if authority else None
        self.parts = list(containers)
        self._probe_tls = ssl.create_default_context(cadata=authority) if authority else None
        if self._probe_tls is not None:
            self._probe_tls.check_hostname = (
                False  # certificates hold for names that mean something in there alone
            )
        self._beside: ContainerPart | None = None

    @classmethod
    async def find(cls, project: str) -> ComposeTarget:
        """The project, when all that a run needs can be done with it.

        Raises:
            ConfigInvalid: no such project runs here, or it has no gateway that this machine reaches.
            PermissionDenied: the engine, or the processes, belong to others.
            Unsupported, DeadlineExceeded: there is no `docker` command, or no answer.
        """
        parts = await _parts_of(project)
        for part in parts:
            if part.pid and not _reached(part):
                raise ConfigInvalid(
                    f"Process {part.pid} of {part.name} is not on this machine. Run the command where the Docker "
                    "engine runs."
                )
        gateway = next((part for part in parts if Aim.GATEWAY in aims_of(part.name)), None)
        address = gateway and gateway.published.get(f"{gateway.settings.get(_PORT, '8000')}/tcp")
        if gateway is None or not address:
            raise ConfigInvalid(f"No gateway of the Compose project {project} is published on this machine.")
        authority = b""
        if gateway.encrypted:
            authority = await docker(
                "exec",
                gateway.container,
                "cat",
                gateway.settings.get(_AUTHORITY, "/run/mooncache/tls/ca.pem"),
            )
        path = gateway.settings.get("MOONCACHE_CLUSTER_TOKEN_FILE", "/run/mooncache/secret/cluster.token")
        tokens = parse_token_file(await docker("exec", gateway.container, "cat", path), Path(path))
        made = cls(
            project,
            {part.name: part.container for part in parts},
            f"{'https' if gateway.encrypted else 'http'}://{address}",
            tokens.signing,
            authority.decode("ascii", "replace"),
        )
        made._beside = next((part for part in parts if Aim.CONDUCTOR in aims_of(part.name)), gateway)
        return made

    async def pid_of(self, part: str, aim: Aim) -> int:
        """As the engine says, when the kernel says the same."""
        (found,) = await self._look(self._containers[part])
        return target_pid(found.pid, aim) if found.pid and _reached(found) else 0

    async def not_well(self) -> str:
        """What containers do not run, and what the probe ports answer."""
        try:
            parts = await self._look(*self._containers.values())
        except MooncacheError as error:
            return error.message
        for part in parts:
            if part.status != "running":
                return f"{part.name}: {part.status}"
            if not part.probe and part.health not in _HEALTHY:
                return f"{part.name}: {part.health}"
        probed = [part for part in parts if part.probe]
        answers = await asyncio.gather(
            *(http_get(part.probe, "/ready", tls=self._probe_tls) for part in probed)
        )
        for part, (status, body) in zip(probed, answers, strict=True):
            if status != 200:
                return f"{part.name}: {reason_of(body) or 'does not answer'}"
        return ""

    async def pins_left(self) -> int:
        """By the nodes' metrics."""
        nodes = [self._containers[name] for name in self._containers if Aim.STORE_NODE in aims_of(name)]
        key = metrics_key(self.token)
        asked = [part.probe for part in await self._look(*nodes) if part.probe] if nodes else []
        pins = await asyncio.gather(*(pins_held(each, key=key, tls=self._probe_tls) for each in asked))
        return sum(each or 0 for each in pins)

    def pool_work(self, tally: PoolTally, run: str) -> ContainerLoad:
        """A client in a container of its own."""
        assert self._beside is not None
        return ContainerLoad(tally, run, self._beside)

    async def _look(self, *containers: str) -> tuple[ContainerPart, ...]:
        return read_parts(await docker("inspect", "--type", "container", *containers))


async def _parts_of(project: str) -> tuple[ContainerPart, ...]:
    """Its parts. Raises as `ComposeTarget.find` does."""
    listed = await docker("ps", "-aq", "--no-trunc", "--filter", f"label={PROJECT_LABEL}={project}")
    ids = listed.decode("ascii", "replace").split()[:_PARTS_MAX]
    parts = read_parts(await docker("inspect", "--type", "container", *ids)) if ids else ()
    if not parts:
        names = await docker("ps", "-a", "--format", f'{{{{.Label "{PROJECT_LABEL}"}}}}')
        others = sorted(set(names.decode(errors="replace").split()))[:_PROJECTS_SHOWN]
        raise ConfigInvalid(
            f"The Docker engine has no Compose project {project!r} with parts of a cluster. "
            + (f"Its projects: {', '.join(others)}." if others else "It has no project at all.")
        )
    return parts


def _reached(part: ContainerPart) -> bool:
    """Whether the container's process runs on this machine. Raises PermissionDenied: it belongs to another user."""
    try:
        groups = Path(f"/proc/{part.pid}/cgroup").read_text(encoding="ascii", errors="replace")
        if not any(part.container in PurePosixPath(line).name for line in groups.splitlines()):
            return False
        os.kill(part.pid, 0)
    except PermissionError:
        raise PermissionDenied(
            f"Process {part.pid} of {part.name} belongs to another user; run the command as root."
        ) from None
    except OSError:
        return False
    return True
