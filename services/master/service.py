"""The master as a process: state, ops, duties and leadership on the common service base.

`run(config)` is the process; `MasterService(config)` can also be started inside another event loop (`mooncache up`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from mooncache._version import __version__
from mooncache.client.host import host_id, host_name
from mooncache.config import Config
from mooncache.coordination import Coordinator, MasterRecord, make_coordinator
from mooncache.errors import NodeUnavailable
from mooncache.master.background import leadership
from mooncache.master.background.duties import master_duties
from mooncache.master.background.rebalance_pool import RebalanceRunner
from mooncache.master.background.repair_replicas import RepairRunner
from mooncache.master.background.run_tasks import TaskRunner
from mooncache.master.limits import MasterLimits
from mooncache.master.ops.table import master_table
from mooncache.master.shell.gauges import add_gauges
from mooncache.master.shell.node_calls import NodeCalls
from mooncache.master.state import MasterState
from mooncache.runtime import tls
from mooncache.runtime.duties import Duty
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import STORE_NODE_SERVICE, RpcTable
from mooncache.runtime.service import Service, run_service

CAMPAIGN_PAUSE_S = 0.2

_CALL_COUNT_MAX = 4096
_DRAIN_TIMEOUT_S = 5.0  # control calls are short


class MasterService(Service):
    """The master as a service. Raises ConfigInvalid for settings that cannot work."""

    def __init__(
        self, config: Config, *, limits: MasterLimits | None = None, coordinator: Coordinator | None = None
    ) -> None:
        section = config.master
        super().__init__(
            "master",
            config,
            host=section.host,
            port=section.port,
            metrics_port=section.metrics_port,
            call_count_max=_CALL_COUNT_MAX,
            drain_timeout_s=_DRAIN_TIMEOUT_S,
            advertise_host=section.advertise_host,
        )
        self.limits = limits or MasterLimits.of(section)
        self.coordinator = coordinator or make_coordinator(config, self.clock)
        self.state: MasterState
        self.tasks: TaskRunner
        self.repairs: RepairRunner
        self.rebalance: RebalanceRunner
        self._nodes: NodeCalls | None = None

    async def build(self) -> RpcTable:
        """Make the state; nothing is known yet."""
        credentials = tls.channel_credentials(self.config.tls)

        def channel_to(target: str) -> GrpcChannel:
            return GrpcChannel(
                target,
                STORE_NODE_SERVICE,
                token=self.tokens,
                credentials=credentials,
                unavailable_error=NodeUnavailable,
                server_name=self.config.tls.server_name,
            )

        self._nodes = NodeCalls(channel_to, self.limits.node_calls_max)
        self.state = MasterState(
            self.limits,
            master_id=self.config.master.master_id,
            grpc_target="",
            clock=self.clock,
            nodes=self._nodes,
            metrics=self.metrics,
        )
        add_gauges(self.metrics, self.state)
        self.tasks = TaskRunner(self.state)
        self.repairs = RepairRunner(self.state)
        self.rebalance = RebalanceRunner(self.state)
        return master_table(self.state)

    async def listening(self) -> None:
        """The port is known now: tell who this master is."""
        self.state.grpc_target = self.grpc_target
        self.state.master_id = self.state.master_id or f"{socket.gethostname()}:{self.grpc_target}"
        self.state.record = MasterRecord(
            self.state.master_id,
            self.grpc_target,
            software_version=__version__,
            host_id=self.config.client.host_id or host_id(),
            host_name=host_name(),
            started_ms=self.started_ms,
            pid=os.getpid(),
        )
        await self.coordinator.start(self.state.record)

    def duties(self) -> Sequence[Duty]:
        """Leadership, and what a leader does on its own."""
        return [
            Duty("lead", lambda: leadership.lead(self.state, self.coordinator), CAMPAIGN_PAUSE_S),
            Duty(
                "follow",
                lambda: leadership.follow(self.state, self.coordinator),
                leadership.FOLLOW_INTERVAL_S,
            ),
            *master_duties(self.state, self.tasks, self.repairs, self.rebalance),
        ]

    def readiness(self) -> str:
        """Ready when a leader is known: this master, or another one that callers can be sent to."""
        return "" if self.state.leading or self.state.leader_target else "no leader is known yet"

    def serving(self) -> str:
        """Only a leader carries calls out; a standby sends callers to it."""
        return "" if self.state.leading else "a standby: another master leads"

    async def drain(self) -> None:
        """Give the leadership up at once, so that a standby need not wait for the lease."""
        await self.coordinator.resign()

    async def shutdown(self) -> None:
        """Let go of the coordination, of copies under way and of the nodes."""
        await self.coordinator.close()
        if self._nodes is not None:
            await self.tasks.stop()
            await self.repairs.stop()
            await self.rebalance.stop()
            await self._nodes.close()


def run(config: Config) -> int:
    """Be the master process; returns the exit status."""
    return run_service("master", config, lambda: MasterService(config))
