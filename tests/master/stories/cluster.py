"""The commands of the master's stories: masters that elect themselves through etcd, store nodes, an operator.

Masters are real (election, operations, duties), nodes are those of the simulation, time is virtual. A block has a short
name such as b1; b1-b4 means four. Terms are large numbers that follow the wall clock; a story counts them from 1.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Any

from mooncache import errors
from mooncache.auth import DEFAULT_TENANT
from mooncache.config import CoordinationSection, TlsSection
from mooncache.coordination import Leadership, MasterRecord
from mooncache.coordination.etcd import EtcdCoordinator
from mooncache.master.background import leadership
from mooncache.master.background.duties import master_duties
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.runtime.duties import Duty, DutyRunner
from mooncache.runtime.rpc import MASTER_SERVICE
from tests.master.simulation.world import CLUSTER, KNOWN_KEYS, SimMaster, SimNode, World
from tests.master.stories.memory_etcd import MemoryEtcd, PausableClock
from tests.rpcs import answer_of
from tests.stories import obey, table

KEYS = sorted(KNOWN_KEYS)
LEASE_S = 5.0


class Candidate(SimMaster):
    """A master that leads only while etcd says so."""

    def __init__(self, world: StoryWorld, name: str) -> None:
        super().__init__(world, name, 0)
        self.world: StoryWorld = world
        self.up = True
        self.clock = PausableClock(world.clock)
        section = CoordinationSection(backend="etcd", lease_s=LEASE_S)
        self.coordinator = EtcdCoordinator(section, TlsSection(), self.clock)
        self.coordinator._api = world.etcd.api(name, self.clock)  # type: ignore[assignment]
        self.election = DutyRunner(world.clock, world.duty_failed)

    async def start(self) -> None:
        await self.coordinator.start(MasterRecord(self.name, self.name))
        self.election.start(
            [
                Duty("lead", lambda: leadership.lead(self.state, self), 0.1),  # type: ignore[arg-type]
                Duty("follow", lambda: leadership.follow(self.state, self.coordinator), 0.5),
            ]
        )

    async def campaign(self) -> Leadership:
        """The coordinator's, with the term noted for people."""
        won = await self.coordinator.campaign()
        self.world.terms.append(won.term)
        return won

    async def shut_down(self) -> None:
        """An orderly end: the leadership is handed back."""
        await self.coordinator.close()
        await self.crash()

    async def crash(self) -> None:
        """kill -9: nobody is told."""
        self.up = False
        self.clock.stop()
        await self.election.stop()
        await self.kill()

    async def stop(self) -> None:
        """SIGSTOP: nothing of the process runs."""
        self.clock.stop()
        await self.duties.stop()

    def go_on(self) -> None:
        """SIGCONT."""
        self.clock.go_on()
        self.duties.start(master_duties(self.state, self.tasks, self.repairs, self.rebalance))


class StoryWorld(World):
    """Masters come one by one; the leader is the one with the newest term among those that believe to lead."""

    def __init__(self) -> None:
        self.masters: dict[str, Candidate] = {}
        self.terms: list[int] = []
        self._leader = ""
        super().__init__(seed=1)
        self.etcd = MemoryEtcd(self.clock)

    def start_master(self) -> None:
        """None leads before an election."""

    @property
    def leader(self) -> str:  # type: ignore[override]
        leading = [master for master in self.masters.values() if master.up and master.state.leading]
        if leading:
            self._leader = max(leading, key=lambda master: master.state.membership.term).name
        return self._leader

    @leader.setter
    def leader(self, name: str) -> None:
        self._leader = name

    @property
    def master(self) -> SimMaster:  # type: ignore[override]
        return self.masters[self.leader]


class Cluster:
    """See the module's text; each `do_` is a command."""

    def __init__(self) -> None:
        self.world = StoryWorld()
        self._asked = ""  # the master that the operator asks; "": whoever leads
        self._stopped: set[str] = set()
        self._kept: dict[str, dict[bytes, None]] = {}  # memory of nodes that do not run

    async def end(self) -> None:
        """Raise AssertionError when a master broke an invariant on the way."""
        for master in self.world.masters.values():
            broken = master.state.instruments.broken_invariants._value.get()
            assert broken == 0, f"{master.name} broke an invariant"
            await master.crash()
        for node in self.world.nodes.values():
            await node.stop()
        assert not self.world.failed_duties

    # --- processes

    async def do_masters(self, *names: str) -> None:
        """Start masters; the first one leads before the next one starts."""
        for name in names:
            self.world.masters[name] = Candidate(self.world, name)
            await self.world.masters[name].start()
            await self.world.clock.sleep(1.1)  # no two of them look at etcd in the same moment

    async def do_nodes(self, *names: str, **labels: str) -> None:
        """nodes a b rack=r1: start store nodes, empty."""
        for name in names:
            self.world.add_node(name, labels)
            await self.world.clock.sleep(1.0)

    async def do_crash(self, *names: str, keep: str = "") -> None:
        """kill -9; with keep=memory the blocks of a node wait for its next process."""
        for name in names:
            if name in self.world.masters:
                await self.world.masters[name].crash()
            else:
                await self._node(name).stop()
                if keep:
                    self._kept[name] = dict(self._node(name).held)
                self._node(name).held.clear()

    async def do_restart(self, *names: str, keep: str = "") -> None:
        """A new process in the place of the old one. It remembers nothing, unless it says keep=memory."""
        for name in names:
            if name in self.world.masters:
                await self.do_masters(name)
            else:
                await self._node(name).restart(self._kept.pop(name, {}) if keep else {})

    async def do_shut_down(self, name: str) -> None:
        await self.world.masters[name].shut_down()

    async def do_stop(self, name: str) -> None:
        """SIGSTOP a master."""
        await self.world.masters[name].stop()
        self._stopped.add(name)
        self.world.network.partition({name}, self._all() - {name})

    def do_continue(self, name: str) -> None:
        """SIGCONT."""
        self._stopped.discard(name)
        self.do_heal()
        self.world.masters[name].go_on()

    async def do_as_it_wakes(self, name: str, *words: str, **named: str) -> str:
        """What a stopped master handles before it looks at the clock."""
        self._stopped.discard(name)
        self.do_heal()
        return await self.do_ask(name, *words, **named)

    # --- network and time

    def do_cut(self, name: str, _from: str, *others: str) -> None:
        """cut A from B C: no message passes, in either direction."""
        for other in others:
            if other == "etcd":
                self.world.etcd.cut.add(name)
            else:
                self.world.network.block(name, other)

    def do_heal(self) -> None:
        """Every cut ends."""
        self.world.network.heal()
        self.world.etcd.cut.clear()
        for name in self._stopped:
            self.world.network.partition({name}, self._all() - {name})

    async def do_wait(self, seconds: str) -> None:
        await self.world.clock.sleep(float(seconds.removesuffix("s")))

    async def do_settle(self) -> None:
        """Wait until the directory names what the nodes hold, neither more nor less; fail when it never does."""
        await self.world.converge()

    # --- blocks

    def do_put(self, name: str, *blocks: str) -> str | None:
        """A client puts blocks on a node."""
        refused = [block for block in names_of(blocks) if not self._node(name).put(KEYS[number(block)])]
        return f"{folded(refused)}  DRAINING" if refused else None

    def do_evict(self, name: str, *blocks: str) -> None:
        """A node makes room."""
        for block in names_of(blocks):
            self._node(name).drop(KEYS[number(block)])

    def do_holds(self) -> str:
        """What the nodes really hold."""
        rows = []
        for name, node in sorted(self.world.nodes.items()):
            rows.append((name, folded(f"b{KEYS.index(key) + 1}" for key in node.held) or "nothing"))
        return table(rows)

    # --- what an operator or a client asks of the master

    async def do_ask(self, name: str, *words: str, **named: str) -> str:
        """ask m1 COMMAND: ask this master, whoever leads."""
        self._asked = name
        try:
            command = " ".join((*words, *(f"{key}={value}" for key, value in named.items())))
            return "\n".join(await obey(self, command))
        finally:
            self._asked = ""

    async def do_where(self, *blocks: str) -> str:
        """What the directory says."""
        names = names_of(blocks)
        found = await self._call("Locate", master_pb2.LocateRequest(keys=keys_of(blocks)))
        if isinstance(found, str):
            return found
        master = self.world.masters[self._asked or self.world.leader]
        known = {node.index: node.node_id for node in master.state.membership.nodes.values()}
        at, places = 0, []
        for _ in names:
            (count,) = struct.unpack_from("<H", found.locations, at)
            entries = [struct.unpack_from("<HBBQ", found.locations, at + 2 + 12 * n) for n in range(count)]
            at += 2 + 12 * count
            places.append(", ".join(sorted(known[holder] for holder, *_ in entries)) or "nowhere")
        return table(grouped(names, places))

    async def do_drain(self, name: str) -> str | None:
        """Empty a node before it leaves."""
        return await self._call_only("DrainNode", master_pb2.DrainNodeRequest(node_id=name, move_blocks=True))

    async def do_call_off_drain(self, name: str) -> str | None:
        return await self._call_only("DrainNode", master_pb2.DrainNodeRequest(node_id=name, cancel=True))

    async def do_keep(self, copies: str) -> str | None:
        """The blocks of the stories' tenant are to have so many copies."""
        limits = common_pb2.TenantLimits(tenant=DEFAULT_TENANT, replicas=int(copies))
        return await self._call_only("SetTenant", master_pb2.SetTenantRequest(limits=limits))

    async def do_replicate(self, *blocks: str, copies: str) -> str | None:
        request = master_pb2.ReplicateBlocksRequest(keys=keys_of(blocks), replica_count=int(copies))
        return await self._call_only("ReplicateBlocks", request)

    async def do_trim(self, *blocks: str, copies: str) -> str:
        """Drop what is beyond so many copies."""
        request = master_pb2.TrimBlocksRequest(keys=keys_of(blocks), replica_count=int(copies))
        return await self._codes("TrimBlocks", request, blocks)

    async def do_remove(self, *blocks: str) -> str:
        return await self._codes("RemoveBlocks", master_pb2.RemoveBlocksRequest(keys=keys_of(blocks)), blocks)

    # --- what is shown

    async def do_show(self, what: str) -> str:
        """show masters | nodes | tasks | refused | repair"""
        shown = {
            "masters": self._masters,
            "nodes": self._nodes,
            "tasks": self._tasks,
            "refused": self._refused,
            "repair": self._repair,
        }
        return await shown[what]()

    async def _masters(self) -> str:
        rows: list[tuple[object, ...]] = []
        for name, master in sorted(self.world.masters.items()):
            self._asked = name
            if not master.up:
                rows.append((name, "down"))
                continue
            status = await self._call("GetStatus", master_pb2.GetStatusRequest())
            if isinstance(status, str):
                rows.append((name, "does not answer"))
            elif status.leading:
                complete = "complete" if status.directory_complete else "not complete yet"
                rows.append(
                    (name, f"leads, term {self.world.terms.index(status.term) + 1}, directory {complete}")
                )
            else:
                leader = next((other.master_id for other in status.masters if other.leader), "")
                rows.append((name, f"standby of {leader}" if leader else "standby, no leader is known"))
        self._asked = ""
        return table(rows)

    async def _nodes(self) -> str:
        status = await self._call("GetStatus", master_pb2.GetStatusRequest())
        if isinstance(status, str):
            return status
        rows: list[tuple[object, ...]] = [("node", "state", "blocks listed")]
        for row in sorted(status.nodes, key=lambda row: row.node.node_id):
            state = common_pb2.NodeState.Name(row.node.state).removeprefix("NODE_STATE_").lower()
            listed = "has yet to report" if row.full_report_pending else row.directory_block_count
            rows.append((row.node.node_id, state, listed))
        return table(rows)

    async def _tasks(self) -> str:
        found = await self._call("ListTasks", master_pb2.ListTasksRequest())
        if isinstance(found, str):
            return found
        rows = []
        for task in found.tasks:
            kind = master_pb2.TaskKind.Name(task.kind).removeprefix("TASK_KIND_").lower()
            state = master_pb2.TaskState.Name(task.state).removeprefix("TASK_STATE_").lower()
            done = f"{task.done_block_count} of {task.block_count} blocks"
            rows.append((f"{kind} {task.node_id}".strip(), state, done))
        return table(rows) or "none"

    async def _refused(self) -> str:
        """How many commands each node did not carry out."""
        return table([(name, len(node.refused)) for name, node in sorted(self.world.nodes.items())])

    async def _repair(self) -> str:
        found = await self._call("GetRepair", master_pb2.GetRepairRequest())
        if isinstance(found, str):
            return found
        state = master_pb2.RepairState.Name(found.state).removeprefix("REPAIR_STATE_").lower()
        rows: list[tuple[object, ...]] = [("state", state)]
        if found.left_bytes:
            rows.append(("blocks short of copies", found.short_block_count))
            rows.append(("blocks too close together", found.close_block_count))
        rows.append(("copies made", found.copied_block_count))
        rows.append(("copies dropped", found.trimmed_count))
        return table(rows)

    # --- helpers

    def _node(self, name: str) -> SimNode:
        return self.world.nodes[name]

    def _all(self) -> set[str]:
        return {*self.world.masters, *self.world.nodes, "operator"}

    async def _call(self, method: str, request: Any) -> Any:
        """Return the response, or the sentence that says how it was refused."""
        target = self._asked or self.world.leader
        channel = self.world.network.channel("operator", target, token=CLUSTER.text)
        try:
            return await channel.call(method, request, answer_of(MASTER_SERVICE, method), 3.0)
        except errors.MooncacheError as error:
            return f"refused: {error.name}"

    async def _call_only(self, method: str, request: Any) -> str | None:
        answer = await self._call(method, request)
        return answer if isinstance(answer, str) else None

    async def _codes(self, method: str, request: Any, blocks: tuple[str, ...]) -> str:
        answer = await self._call(method, request)
        if isinstance(answer, str):
            return answer
        return table(grouped(names_of(blocks), [errors.code_name(code) for code in answer.codes]))


def number(block: str) -> int:
    return int(block.removeprefix("b")) - 1


def names_of(blocks: tuple[str, ...]) -> list[str]:
    """b1 b3-b5 -> b1, b3, b4, b5"""
    found = []
    for word in blocks:
        match = re.fullmatch(r"b(\d+)(?:-b(\d+))?", word)
        if match is None:
            raise TypeError(f"{word!r} names no block")
        found += [f"b{n}" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return found


def keys_of(blocks: tuple[str, ...]) -> bytes:
    return b"".join(KEYS[number(block)] for block in names_of(blocks))


def folded(blocks: Iterable[str]) -> str:
    """b1, b3, b4, b5 -> b1 b3-b5"""
    words: list[list[int]] = []
    for place in sorted(number(block) + 1 for block in blocks):
        if words and words[-1][-1] == place - 1:
            words[-1][1:] = [place]
        else:
            words.append([place])
    return " ".join("-".join(f"b{place}" for place in word) for word in words)


def grouped(blocks: list[str], answers: list[str]) -> list[tuple[object, ...]]:
    """Blocks with the same answer share a row."""
    return [
        (folded(name for name, given in zip(blocks, answers, strict=True) if given == answer), answer)
        for answer in dict.fromkeys(answers)
    ]
