"""What the conductor does from time to time: plan the roles of the instances.

Duties go on as long as requests come or are under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncache.conductor.core.policy.roles import RolePlanner

if TYPE_CHECKING:
    from mooncache.simulate.trouble import Trouble
    from mooncache.simulate.world import World


class Duties:
    """Periodic handlers; they exist only where the cluster asks for them."""

    def __init__(self, world: World, trouble: Trouble) -> None:
        self.world, self.trouble = world, trouble
        self._planner = RolePlanner()
        if world.cluster.roles.enabled and len(world.trace):
            world.push(float(world.trace.arrival_s[0]), self._plan_roles)

    def _plan_roles(self) -> None:
        world, book = self.world, self.world.book
        switches = self._planner.plan(book.view(world.now_s), book.arrived_s, world.tbt_slo_s, world.now_s)
        for row, role in switches:
            self.trouble.switch(world.nodes[row], role)
        if world.lives or world.now_s < world.trace.arrival_s[-1]:
            world.push(world.now_s + world.cluster.roles.every_s, self._plan_roles)
