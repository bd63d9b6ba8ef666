"""A third party that elects, and how a process is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Backend:
    """`server`: an EtcdServer, or a KubernetesApi; both can be started, paused and resumed."""

    name: str
    server: Any

    def stop(self) -> None:
        """End it; what it knows stays."""
        (self.server.kill if self.name == "etcd" else self.server.stop)()

    def settings(self, lease_s: float, election: str = "coordination.backend") -> dict[str, str]:
        """What a process that elects through it is configured with. election: the setting that chooses."""
        found = {election: self.name, "coordination.lease_s": str(lease_s)}
        if self.name == "etcd":
            return found | {"coordination.etcd_endpoints": self.server.endpoint}
        return found | {
            "coordination.kubernetes_api": self.server.url,
            "coordination.kubernetes_account": str(self.server.folder),
        }

    def env(self, lease_s: float, election: str = "coordination.backend") -> dict[str, str]:
        """The same as environment variables."""
        found = self.settings(lease_s, election).items()
        return {f"MOONCACHE_{name.upper().replace('.', '_')}": value for name, value in found}
