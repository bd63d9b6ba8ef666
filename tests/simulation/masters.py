"""Masters of a simulated cluster: the real election, state, operations and duties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncache import errors
from mooncache.coordination import MasterRecord
from mooncache.master.background import leadership
from mooncache.master.background.duties import master_duties
from mooncache.master.background.rebalance_pool import RebalanceRunner
from mooncache.master.background.repair_replicas import RepairRunner
from mooncache.master.background.run_tasks import TaskRunner
from mooncache.master.core.reports import ReportRules
from mooncache.master.limits import MasterLimits
from mooncache.master.ops.table import master_table
from mooncache.master.shell.node_calls import NodeCalls
from mooncache.master.state import MasterState
from mooncache.runtime.duties import Duty, DutyRunner
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.rpc import STORE_NODE_SERVICE
from mooncache.runtime.run_op import OpRunner
from tests.master.rules import membership_rules, placement_rules, rebalance_rules, repair_rules
from tests.simulation.elections import holds

if TYPE_CHECKING:
    from tests.simulation.world import World


def limits(replicas: int) -> MasterLimits:
    """A master's limits at the pace of a simulation."""
    return MasterLimits(
        heartbeat_interval_s=1.0,
        membership=membership_rules(suspect_after_s=2.0, dead_after_s=4.0, forget_after_s=60.0),
        placement=placement_rules(slow_start_s=2.0),
        repair=repair_rules(grace_s=3.0, replicas=replicas, bytes_per_s=4e6, retry_delay_max_s=4.0),
        rebalance=rebalance_rules(settle_s=3.0, bytes_per_s=1e6),
        reports=ReportRules(buffered_bytes_max=56 * 64, full_timeout_s=4.0),
        expire_interval_s=0.5,
        check_interval_s=2.0,
        task_interval_s=0.25,
        copy_timeout_s=3.0,
        node_call_timeout_s=2.0,
    )


class SimMaster:
    """One life of a master's process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.process = world.begin(name)
        self.clock = world.clock_of(self.process)
        self.state: MasterState
        self.process.run(self._build)
        self.process.spawn(self._start())

    def _build(self) -> None:
        world, network = self.world, self.world.network
        rules = limits(world.shape.replicas)
        channel_to = network.channel_for(STORE_NODE_SERVICE, errors.NodeUnavailable)
        self.state = MasterState(
            rules,
            master_id=self.name,
            grpc_target=self.name,
            clock=self.clock,
            nodes=NodeCalls(channel_to, rules.node_calls_max),
            metrics=Metrics("master"),
            make_index=world.make_index,
        )
        begin_term = self.state.begin_term
        self.elector = world.elections.coordinator(
            "masters", world.shape.masters_elect, self.name, self.clock
        )

        def begin(term: int) -> None:
            if self.holds:
                others = [other.name for other in world.masters.values() if other is not self and other.holds]
                world.ledger.leads_alone(self.name, others)
            world.ledger.term_begun(term, f"{self.name}/{self.process.life}")
            begin_term(term)

        self.state.begin_term = begin  # type: ignore[method-assign]
        self.tasks, self.repairs = TaskRunner(self.state), RepairRunner(self.state)
        self.rebalance = RebalanceRunner(self.state)
        observer: Any = world.observer(self.name)
        network.listen(self.name, self.process, OpRunner(master_table(self.state), self.clock, observer))

    async def _start(self) -> None:
        await self.elector.start(MasterRecord(self.name, self.name))
        duties = DutyRunner(self.clock, self.world.duty_failed(self.name))
        duties.start(
            [
                Duty("lead", lambda: leadership.lead(self.state, self.elector), 0.2),
                Duty("follow", lambda: leadership.follow(self.state, self.elector), 0.5),
                *master_duties(self.state, self.tasks, self.repairs, self.rebalance),
            ]
        )

    @property
    def leads(self) -> bool:
        """Whether this process believes to lead."""
        return not self.process.dead and self.state.leading

    @property
    def holds(self) -> bool:
        """Whether this process leads by its own clock, and nobody else may."""
        return not self.process.dead and holds(self.elector, self.clock)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self.state.instruments.broken_invariants._value.get() == 0, (
            f"{self.name} broke an invariant of its own"
        )
        if self.leads:
            self.state.check()
            for used, blocks in self.state.directory.tenant_usage().values():
                assert used >= 0 and blocks >= 0, "a tenant's use is negative"
