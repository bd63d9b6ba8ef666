"""How masters and conductors of a simulated cluster elect leaders: the real coordinators, a modelled etcd and Lease.

Which of them a cluster has is the seed's choice. The API server of the Lease is reached over the same bad network as
everything: calls are late, lost, carried out though the answer is lost, or arrive after they were given up. Clocks of
candidates run too fast or too slow.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mooncache.config import CoordinationSection, TlsSection
from mooncache.coordination.embedded import EmbeddedCoordinator
from mooncache.coordination.etcd import EtcdCoordinator
from mooncache.coordination.lease import LeaseCoordinator
from mooncache.coordination.lease_object import TERM, changed, new_lease, released_spec
from tests.coordination.memory_lease import LeaseLine, MemoryLease, Travel
from tests.master.stories.memory_etcd import MemoryEtcd

if TYPE_CHECKING:
    from tests.simulation.world import ProcessClock, World

LEASE_S = 3.0
DRIFT_MAX = 0.01
"""By which share of time a candidate's clock runs too fast or too slow."""
_API = "kubernetes"
_SECTION = CoordinationSection(
    backend="lease",
    lease_s=LEASE_S,
    lease_namespace=LeaseLine.namespace,
    kubernetes_api="https://kubernetes",
    kubernetes_account=Path("/nowhere"),
)
Elector = EtcdCoordinator | LeaseCoordinator | EmbeddedCoordinator


class Elections:
    """What stands for etcd and the Kubernetes API, and the state folder of a single master."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.etcd = MemoryEtcd(world.clock)
        self.cut = self.etcd.cut  # who does not reach the coordination
        self.mute = self.etcd.mute  # whose calls are carried out, and who does not hear the answers
        self.late_s = self.etcd.late_s  # who hears the answers so much later
        self._leases = {kind: MemoryLease(f"mooncache-{kind}") for kind in ("masters", "conductors")}
        for lease in self._leases.values():
            if world.rng.random() < 0.8:  # else nobody has ever led, and all wait for the time of a lease
                lease.create(
                    changed(new_lease(lease.name, LeaseLine.namespace), released_spec(1), {TERM: "1"})
                )
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def heal(self) -> None:
        """Everybody is heard and hears."""
        self.cut.clear()
        self.mute.clear()
        self.late_s.clear()

    def coordinator(self, kind: str, backend: str, name: str, clock: ProcessClock) -> Elector:
        """A candidate's coordinator. kind: "masters" or "conductors"."""
        if backend == "embedded":
            self._folder = self._folder or tempfile.TemporaryDirectory()
            return EmbeddedCoordinator(Path(self._folder.name) / "master.term", clock)
        if backend == "etcd":
            section = CoordinationSection(backend="etcd", lease_s=LEASE_S, prefix=f"/{kind}")
            etcd = EtcdCoordinator(section, TlsSection(), clock)
            etcd._api = self.etcd.api(name, clock)  # type: ignore[assignment]
            return etcd
        lease = LeaseCoordinator(_SECTION, kind, clock)
        lease._api = LeaseLine(self._leases[kind], partial(self._travel, name))  # type: ignore[assignment]
        return lease

    def _travel(self, name: str) -> Travel:
        """The way of one call to the Kubernetes API."""
        network = self._world.network
        lost, answer_lost = network.drops(name, _API), network.drops(_API, name)
        back_s = network.delay_s() + self.late_s.get(name, 0.0)
        return Travel(network.delay_s(), back_s, lost or name in self.cut, answer_lost or name in self.mute)

    def close(self) -> None:
        """The world is over."""
        if self._folder is not None:
            self._folder.cleanup()


def holds(elector: Elector, clock: ProcessClock) -> bool:
    """Whether a candidate leads by its own clock."""
    leadership = elector._leadership
    return leadership is not None and leadership.holds(clock.now_s())


def died(elector: Elector) -> None:
    """The candidate's process ended: the system lets its lock go."""
    if isinstance(elector, EmbeddedCoordinator) and elector._descriptor >= 0:
        os.close(elector._descriptor)
        elector._descriptor = -1
