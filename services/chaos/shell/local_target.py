"""The cluster that `mooncache up` runs on this machine, as its state folder describes it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from mooncache.auth import Token, load_cluster_token
from mooncache.chaos.core.faults import Aim
from mooncache.chaos.core.records import PoolTally
from mooncache.chaos.shell import health, processes
from mooncache.chaos.shell.pool_load import PoolLoad
from mooncache.config import load


class LocalTarget:
    """A `ChaosTarget`. Raises ConfigInvalid: no cluster with engines runs there."""

    def __init__(self, state_dir: Path) -> None:
        found = processes.cluster_here(state_dir)
        config = load(overrides={"cluster.state_dir": str(state_dir)})
        self._state_dir = state_dir
        self.name = "mooncache up"
        self.gateway_url = found.gateway_url
        self.token: Token = load_cluster_token(config.cluster.token_path)
        self.tls = ssl.create_default_context(cafile=found.tls_ca) if found.tls_ca else None
        self.parts: Sequence[str] = [part.name for part in found.parts]

    async def pid_of(self, part: str, aim: Aim) -> int:
        """As the supervisor's file says."""
        return processes.target_pid(processes.pid_of(self._state_dir, part), aim)

    async def not_well(self) -> str:
        """What the supervisor and the parts say."""
        return await health.not_well(self._state_dir)

    async def pins_left(self) -> int:
        """By the nodes' metrics."""
        return await health.pins_left(self._state_dir)

    def pool_work(self, tally: PoolTally, run: str) -> PoolLoad:
        """A client in a thread of this process."""
        return PoolLoad(tally, run, {"state_dir": str(self._state_dir)})
