"""The containers of a Compose project as parts of a cluster, read from what `docker inspect` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from mooncache.chaos.core.faults import aims_of
from mooncache.errors import ProtocolError

PROJECT_LABEL: Final = "com.docker.compose.project"
_SERVICE: Final = "com.docker.compose.service"
_ONE_OFF: Final = "com.docker.compose.oneoff"
_NUMBER: Final = "com.docker.compose.container-number"
_PROBE_PORT: Final = "_METRICS_PORT"  # MOONCACHE_<SERVICE>_METRICS_PORT
_ANYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104 - what Docker prints, no address to listen at
_YES: Final = frozenset({"true", "1", "yes", "on"})


@dataclass(frozen=True, slots=True)
class ContainerPart:
    """A service of the project, as its container is at this moment."""

    name: str
    """The service's name, as aims go by it; a second container of one service has its number behind it."""
    container: str
    """Its whole id."""
    pid: int
    """Of its first process, as the engine's host counts; 0 while it does not run."""
    status: str
    """running, restarting, exited, ..."""
    health: str
    """What its health check found last; empty where it has none."""
    image: str
    address: str
    """In one of its networks; empty while it does not run."""
    networks: tuple[str, ...]
    published: Mapping[str, str]
    """Port inside -> host:port by which this machine reaches it."""
    settings: Mapping[str, str]
    """Its environment."""

    @property
    def probe(self) -> str:
        """host:port of its probe server; empty where it has none (etcd), or does not run."""
        ports = [value for name, value in self.settings.items() if name.endswith(_PROBE_PORT)]
        return f"{self.address}:{ports[0]}" if ports and self.address else ""

    @property
    def encrypted(self) -> bool:
        """Whether its ports speak TLS."""
        return self.settings.get("MOONCACHE_TLS_ENABLED", "").lower() in _YES


class _Health(msgspec.Struct, rename="pascal"):
    status: str = ""


class _State(msgspec.Struct, rename="pascal"):
    status: str
    pid: int
    health: _Health | None = None


class _Config(msgspec.Struct, rename="pascal"):
    image: str
    env: list[str] | None = None
    labels: dict[str, str] | None = None


class _Binding(msgspec.Struct, rename="pascal"):
    host_ip: str
    host_port: str


class _Network(msgspec.Struct, rename="pascal"):
    address: str = msgspec.field(name="IPAddress", default="")


class _Networks(msgspec.Struct, rename="pascal"):
    ports: dict[str, list[_Binding] | None] | None = None
    networks: dict[str, _Network] | None = None


class _Inspected(msgspec.Struct, rename="pascal"):
    id: str
    state: _State
    config: _Config
    network_settings: _Networks


def read_parts(inspected: bytes) -> tuple[ContainerPart, ...]:
    """The parts that faults can hit, by name; containers that ran once (`compose run`, `token`) are left out.

    Raises:
        ProtocolError: that is no answer of `docker inspect`.
    """
    try:
        found = msgspec.json.decode(inspected, type=list[_Inspected])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"`docker inspect` printed something else than expected: {error}.") from None
    parts = (_part(each) for each in found)
    return tuple(sorted((part for part in parts if aims_of(part.name)), key=lambda part: part.name))


def _part(found: _Inspected) -> ContainerPart:
    labels = found.config.labels or {}
    name, number = labels.get(_SERVICE, ""), labels.get(_NUMBER, "1")
    if labels.get(_ONE_OFF, "").lower() in _YES:
        name = ""
    networks = found.network_settings.networks or {}
    return ContainerPart(
        name=name if number == "1" or not name else f"{name}-{number}",
        container=found.id,
        pid=found.state.pid,
        status=found.state.status,
        health=found.state.health.status if found.state.health is not None else "",
        image=found.config.image,
        address=next((each.address for each in networks.values() if each.address), ""),
        networks=tuple(networks),
        published={
            port: f"{'127.0.0.1' if bound[0].host_ip in _ANYWHERE else bound[0].host_ip}:{bound[0].host_port}"
            for port, bound in (found.network_settings.ports or {}).items()
            if bound
        },
        settings=dict(line.partition("=")[::2] for line in found.config.env or ()),
    )
