"""One cluster map for several clients: the one that keeps it, and those of tenants that go with it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from mooncache.client.engine import ClientCore
from mooncache.client.options import new_native
from mooncache.client.results import ClusterView

if TYPE_CHECKING:
    from mooncache.auth import SessionToken
    from mooncache.client.locator import Locate
    from mooncache.client.options import ClientOptions


class SharedMap:
    """Hands each new map to every core that is in use. Thread-safe."""

    def __init__(self, first: ClientCore) -> None:
        self._lock = threading.Lock()
        self._cores = weakref.WeakSet([first])
        self._view = ClusterView()

    def add(self, core: ClientCore) -> None:
        """From now on this core hears of maps, too; it gets the present one at once."""
        with self._lock:
            self._cores.add(core)
            core.apply_view(self._view)

    def tenant_core(self, options: ClientOptions, session: SessionToken, locate: Locate | None) -> ClientCore:
        """A core whose sessions at nodes act for a tenant; it gets the maps."""
        core = ClientCore(
            new_native(options, session),
            default_timeout_s=options.timeout_s,
            default_replicas=options.replicas,
            locate=locate,
        )
        self.add(core)
        return core

    def apply(self, view: ClusterView) -> None:
        """A new map."""
        with self._lock:
            self._view = view
            for core in self._cores:
                core.apply_view(view)
