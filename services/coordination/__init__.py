"""How masters agree on a leader: embedded (one master) or etcd, behind one interface."""

from __future__ import annotations

from mooncache.config import Config
from mooncache.coordination.base import Coordinator, Leadership, MasterRecord
from mooncache.coordination.embedded import EmbeddedCoordinator
from mooncache.runtime.clock import Clock

__all__ = ["Coordinator", "EmbeddedCoordinator", "Leadership", "MasterRecord", "make_coordinator"]


def make_coordinator(config: Config, clock: Clock) -> Coordinator:
    """The coordinator that the configuration asks for. Raises ConfigInvalid."""
    if config.coordination.backend == "etcd":
        from mooncache.coordination.etcd import EtcdCoordinator  # loads etcd's messages

        return EtcdCoordinator(config.coordination, config.tls, clock)
    return EmbeddedCoordinator(config.cluster.state_dir / "master.term", clock)
