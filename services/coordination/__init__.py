"""How masters agree on a leader: embedded (one master) or etcd, behind one interface."""

from mooncache.coordination.base import Coordinator, Leadership, MasterRecord, make_coordinator
from mooncache.coordination.embedded import EmbeddedCoordinator

__all__ = ["Coordinator", "EmbeddedCoordinator", "Leadership", "MasterRecord", "make_coordinator"]
