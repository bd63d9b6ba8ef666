"""How masters, or conductors, agree on a leader: embedded, etcd, a Lease of Kubernetes, behind one interface."""

from __future__ import annotations

from mooncache.config import Config
from mooncache.coordination.base import Coordinator, Leadership, MasterRecord
from mooncache.coordination.embedded import EmbeddedCoordinator
from mooncache.errors import ConfigInvalid
from mooncache.runtime.clock import Clock

__all__ = [
    "Coordinator",
    "EmbeddedCoordinator",
    "Leadership",
    "MasterRecord",
    "make_conductor_coordinator",
    "make_coordinator",
]


def make_coordinator(config: Config, clock: Clock) -> Coordinator:
    """The coordinator of masters that the configuration asks for. Raises ConfigInvalid."""
    if config.coordination.backend == "embedded":
        return EmbeddedCoordinator(config.cluster.state_dir / "master.term", clock)
    return _third_party(config, config.coordination.backend, "masters", clock)


def make_conductor_coordinator(config: Config, clock: Clock) -> Coordinator | None:
    """The coordinator of conductors; None when they elect each other. Raises ConfigInvalid."""
    if config.conductor.election == "peers":
        return None
    return _third_party(config, config.conductor.election, "conductors", clock)


def _third_party(config: Config, backend: str, kind: str, clock: Clock) -> Coordinator:
    section = config.coordination
    if backend == "etcd":
        from mooncache.coordination.etcd import EtcdCoordinator  # loads etcd's messages

        if kind != "masters":  # whose keys are those of earlier versions
            section = section.model_copy(update={"prefix": f"{section.prefix.rstrip('/')}/{kind}"})
        return EtcdCoordinator(section, config.tls, clock)
    try:
        from mooncache.coordination.lease import LeaseCoordinator
    except ModuleNotFoundError:
        raise ConfigInvalid(
            "A Lease of Kubernetes needs the extra serve: pip install 'mooncache[serve]'."
        ) from None
    return LeaseCoordinator(section, kind, clock)
