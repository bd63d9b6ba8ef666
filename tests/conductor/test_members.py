"""The list of the cluster's processes: who is heard of, who is silent, who ended; and who learns it of whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache._version import __version__
from mooncache.client.members import compare_clocks, members_of_pool
from mooncache.conductor.background import look_at_pool
from mooncache.conductor.core.members import (
    GONE_INTERVALS,
    INTERVAL_S,
    LISTED_S,
    SILENT_INTERVALS,
    MemberBook,
    MemberInfo,
    MemberKind,
    Presence,
)
from mooncache.conductor.member_messages import member_message, member_of
from mooncache.errors import InvalidArgument, MasterUnavailable, NotLeader
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import Conductor, serve

SILENT_S, GONE_S = SILENT_INTERVALS * INTERVAL_S, GONE_INTERVALS * INTERVAL_S


def gateway(name: str = "gateway-1", address: str = "http://10.0.0.5:8000", **more: object) -> MemberInfo:
    return MemberInfo(MemberKind.GATEWAY, name, address, **more)  # type: ignore[arg-type]


def presences(book: MemberBook, now_s: float) -> dict[str, Presence]:
    return {one.info.name: one.presence for one in book.listed(now_s)}


def test_a_member_is_silent_then_gone_then_forgotten() -> None:
    book = MemberBook()
    book.heard(gateway(), 100.0)
    assert presences(book, 100.0 + SILENT_S) == {"gateway-1": Presence.PRESENT}
    assert presences(book, 100.1 + SILENT_S) == {"gateway-1": Presence.SILENT}
    assert presences(book, 100.1 + GONE_S) == {"gateway-1": Presence.GONE}
    book.heard(gateway(), 200.0)
    assert presences(book, 200.0) == {"gateway-1": Presence.PRESENT}
    assert presences(book, 200.1 + GONE_S + LISTED_S) == {}


def test_one_that_says_goodbye_has_stopped_and_may_come_back() -> None:
    book = MemberBook()
    book.heard(gateway(started_ms=1), 0.0)
    book.heard(gateway(started_ms=1), 1.0, leaving=True)
    assert presences(book, 1.0) == {"gateway-1": Presence.STOPPED}
    book.heard(gateway(started_ms=2), 2.0)
    assert presences(book, 2.0) == {"gateway-1": Presence.PRESENT}
    book.heard(gateway(started_ms=1), 3.0, leaving=True)  # the goodbye of the former process was late
    assert presences(book, 3.0) == {"gateway-1": Presence.PRESENT}


def test_a_restart_elsewhere_is_the_same_worker_and_another_gateway() -> None:
    book = MemberBook()
    for address in ("10.0.0.5:1", "10.0.0.5:2"):
        book.heard(MemberInfo(MemberKind.WORKER, "decode-1", address), 0.0)
        book.heard(gateway(address=f"http://{address}"), 0.0)
    found = [(one.info.kind, one.info.address) for one in book.listed(0.0)]
    assert found == [
        (MemberKind.GATEWAY, "http://10.0.0.5:1"),
        (MemberKind.GATEWAY, "http://10.0.0.5:2"),
        (MemberKind.WORKER, "10.0.0.5:2"),
    ]


def test_an_older_word_changes_nothing_and_a_new_one_of_the_same_moment_does() -> None:
    book = MemberBook()
    node = MemberInfo(MemberKind.STORE_NODE, "node-1", "a:1", state="ready")
    book.heard(node, 10.0)
    book.heard(MemberInfo(MemberKind.STORE_NODE, "node-1", "a:1", state="joining"), 5.0)
    assert [one.info.state for one in book.listed(10.0)] == ["ready"]
    book.heard(MemberInfo(MemberKind.STORE_NODE, "node-1", "a:1", state="dead"), 9.999)
    assert [(one.info.state, one.heard_age_s) for one in book.listed(10.0)] == [("dead", 0.0)]


def test_there_is_a_limit_and_what_ended_goes_first() -> None:
    book = MemberBook(count_max=3)
    for number in range(3):
        book.heard(gateway(f"g{number}"), float(number))
    book.heard(gateway("g2"), 3.0, leaving=True)
    book.heard(gateway("new"), 4.0)
    assert set(presences(book, 4.0)) == {"g0", "g1", "new"}
    book.heard(gateway("newer"), 5.0)
    assert set(presences(book, 5.0)) == {"g1", "new", "newer"}
    book.check()


def test_many_members_announce_themselves_less_often() -> None:
    book = MemberBook()
    assert book.interval_s == INTERVAL_S
    for number in range(1000):
        book.heard(gateway(f"g{number}"), 0.0)
    assert book.interval_s == 10.0
    assert set(presences(book, 10.0 * SILENT_INTERVALS).values()) == {Presence.PRESENT}


def test_what_it_says_of_itself_travels() -> None:
    info = gateway(host_id="h", host_name="a", software_version="1", started_ms=5, state="ready", pid=7)
    assert member_of(member_message(info)) == info
    compared = gateway(clock_offset_ms=-1500, clock_bound_ms=0)
    assert member_of(member_message(compared)) == compared


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": 0},
        {"kind": 99},
        {"name": ""},
        {"name": "x" * 300},
        {"address": "a\nb"},
        {"state": "x" * 33},
        {"host_name": "\x1b[2J"},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    message = member_message(gateway())
    for name, value in wrong.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgument):
        member_of(message)


def test_clocks_are_compared_by_the_middle_of_a_round_trip() -> None:
    assert compare_clocks(1_000_500, 1000.0, 1.0) == (0, 501)
    assert compare_clocks(990_000, 1000.0, 0.0) == (10_000, 1)


def announcement(**more: object) -> pb.AnnounceMemberRequest:
    return pb.AnnounceMemberRequest(member=member_message(gateway(**more)))  # type: ignore[arg-type]


async def listed(c: Conductor) -> dict[str, pb.MemberView]:
    answer = await c.call("ListMembers", pb.ListMembersRequest())
    return {view.member.name: view for view in answer.members}


def test_announced_processes_and_the_conductor_itself_are_listed(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        answer = await c.call("AnnounceMember", announcement(state="ready"))
        assert answer.interval_ms == INTERVAL_S * 1e3 and answer.wall_ms > 0
        found = await listed(c)
        assert found["gateway-1"].presence == pb.MEMBER_PRESENCE_PRESENT
        itself = next(view.member for name, view in found.items() if name != "gateway-1")
        assert (itself.kind, itself.state) == (pb.MEMBER_KIND_CONDUCTOR, "leader")
        assert (itself.address, itself.software_version) == (c.service.grpc_target, __version__)
        goodbye = announcement(state="draining")
        goodbye.leaving = True
        await c.call("AnnounceMember", goodbye)
        assert (await listed(c))["gateway-1"].presence == pb.MEMBER_PRESENCE_STOPPED
        with pytest.raises(InvalidArgument):
            await c.call("AnnounceMember", pb.AnnounceMemberRequest())

    serve(tmp_path, scenario)


def pool_status() -> master_pb2.GetStatusResponse:
    status = master_pb2.GetStatusResponse(master_id="m1", software_version="1", leading=True)
    status.masters.add(master_id="m1", grpc_target="a:7700", leader=True, host_name="a", started_ms=3)
    status.masters.add(master_id="m2", grpc_target="b:7700", software_version="2", host_name="b")
    node = common_pb2.NodeInfo(node_id="node-1", host_id="h", state=common_pb2.NODE_STATE_DEAD)
    node.endpoints.grpc_target = "b:1"
    status.nodes.add(node=node, heartbeat_age_ms=20_000, host_name="b", pid=4)
    return status


def test_the_pools_processes_come_from_the_master() -> None:
    found = {member.name: (member, age_s) for member, age_s in members_of_pool(pool_status())}
    assert {name: (member.state, member.software_version) for name, (member, _) in found.items()} == {
        "m1": ("leader", "1"),
        "m2": ("standby", "2"),
        "node-1": ("dead", ""),
    }
    assert found["node-1"][1] == 20.0 and found["node-1"][0].pid == 4


def test_the_conductor_asks_the_master_and_says_when_it_does_not_answer(tmp_path: Path) -> None:
    class Pool:
        answer: master_pb2.GetStatusResponse | None = pool_status()

        async def ask(self) -> master_pb2.GetStatusResponse:
            if self.answer is None:
                raise MasterUnavailable("nobody there")
            return self.answer

    async def scenario(c: Conductor) -> None:
        state, pool = c.service.state, Pool()
        await look_at_pool.run_once(state, pool)  # type: ignore[arg-type]
        found = await listed(c)
        assert found["m2"].presence == pb.MEMBER_PRESENCE_PRESENT
        assert found["node-1"].presence == pb.MEMBER_PRESENCE_SILENT, (
            "as long as the master has not heard of it"
        )
        pool.answer = None
        await look_at_pool.run_once(state, pool)  # type: ignore[arg-type]
        assert state.pool_reason == "nobody there"

    serve(tmp_path, scenario)


def test_a_standby_takes_no_announcement_and_knows_the_leaders(tmp_path: Path) -> None:
    from mooncache.conductor.member_messages import announcement_of
    from mooncache.conductor.shell.replay import replay

    async def scenario(c: Conductor) -> None:
        state = c.service.state
        book = MemberBook()
        now_s = state.clock.now_s()
        book.heard(gateway("there"), now_s)
        book.heard(gateway("silent"), now_s - SILENT_S - 1)
        book.heard(gateway("ended"), now_s, leaving=True)
        for one in book.listed(now_s):
            assert replay(state, announcement_of(one), now_s)
        assert {name: view.presence for name, view in (await listed(c)).items() if "-" not in name} == {
            "there": pb.MEMBER_PRESENCE_PRESENT,
            "silent": pb.MEMBER_PRESENCE_SILENT,
            "ended": pb.MEMBER_PRESENCE_STOPPED,
        }
        state.leadership.targets = ("a:1", "b:1")
        state.leadership.seek()
        with pytest.raises(NotLeader):
            await c.call("AnnounceMember", announcement())

    serve(tmp_path, scenario)
