"""Election by a Lease, beside test_elections.py: faults of the API server, of its objects, of files."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache import config as configuration
from mooncache.config import CoordinationSection
from mooncache.coordination import Leadership, MasterRecord, make_coordinator
from mooncache.coordination.lease import LeaseCoordinator
from mooncache.coordination.lease_api import ANSWER_BYTES_MAX, LeaseApi
from mooncache.coordination.lease_object import LEADER, TERM, changed, lease_of, member_name, micro_time
from mooncache.errors import ConfigInvalid, MasterUnavailable, Unauthenticated
from mooncache.runtime.certificates import make_certificates
from mooncache.runtime.clock import SystemClock
from tests.conditions import until, wait_until
from tests.coordination.kubernetes_api import NAMESPACE, KubernetesApi, running_api

WAIT_S = 90.0
Make = Callable[..., Any]


def section_for(api: KubernetesApi, **changes: Any) -> CoordinationSection:
    settings = {"kubernetes_api": api.url, "kubernetes_account": api.folder, "lease_s": 2} | changes
    return CoordinationSection(backend="lease", **settings)


@pytest.fixture
async def make(kubernetes: KubernetesApi) -> AsyncIterator[Make]:
    """Makes started coordinators, named a, b, c …"""
    made: list[LeaseCoordinator] = []
    names = itertools.count()

    async def one(**changes: Any) -> LeaseCoordinator:
        coordinator = LeaseCoordinator(section_for(kubernetes, **changes), "masters", SystemClock())
        name = "abcdefgh"[next(names)]
        await coordinator.start(MasterRecord(name, f"{name}:1"))
        made.append(coordinator)
        return coordinator

    yield one
    for coordinator in made:
        await coordinator.close()


async def within(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, WAIT_S)


async def renewals(api: KubernetesApi, count: int) -> None:
    """Wait until the leader has renewed so often."""
    seen = set()

    def enough() -> bool:
        seen.add(api.lease()["spec"]["renewTime"])
        return len(seen) > count

    await until(enough)


async def test_the_object_says_who_leads_to_people_and_their_tools(
    make: Make, kubernetes: KubernetesApi
) -> None:
    first, second = await make(), await make()
    won = await within(first.campaign())
    lease = kubernetes.lease()
    assert lease["spec"]["holderIdentity"].startswith("a_")
    assert lease["spec"]["leaseDurationSeconds"] == 2
    assert lease["spec"]["leaseTransitions"] == 1
    assert lease["metadata"]["annotations"][TERM] == str(won.term)
    await first.resign()
    assert "holderIdentity" not in kubernetes.lease()["spec"]
    await within(second.campaign())
    assert kubernetes.lease()["spec"]["holderIdentity"].startswith("b_")
    assert kubernetes.lease()["spec"]["leaseTransitions"] == 2


async def test_of_many_that_try_at_once_one_wins(make: Make, kubernetes: KubernetesApi) -> None:
    candidates = [await make() for _ in range(6)]
    running = [asyncio.ensure_future(candidate.campaign()) for candidate in candidates]
    for _ in range(4):
        done, _ = await within(asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))
        await renewals(kubernetes, 2)
        done = {task for task in running if task.done()}
        assert len(done) == 1
        at = running.index(done.pop())
        await candidates[at].resign()
        running[at] = asyncio.ensure_future(candidates[at].campaign())
    for task in running:
        task.cancel()


async def test_writes_of_others_cost_a_leader_nothing(make: Make, kubernetes: KubernetesApi) -> None:
    leader = await make()
    won = await within(leader.campaign())
    for at in range(8):
        kubernetes.edit(lambda lease, at=at: lease["metadata"]["annotations"].update({"note": str(at)}))  # type: ignore[misc]
        await asyncio.sleep(0.4)
    assert not won.lost.is_set()
    await until(lambda: kubernetes.lease()["metadata"]["annotations"]["note"] == "7")


async def test_a_lease_that_somebody_else_took_ends_leadership(make: Make, kubernetes: KubernetesApi) -> None:
    leader = await make()
    won = await within(leader.campaign())
    kubernetes.edit(lambda lease: lease["spec"].update(holderIdentity="intruder", leaseDurationSeconds=3))
    await within(won.lost.wait())
    began_s = time.monotonic()
    again = await within(leader.campaign())
    assert time.monotonic() - began_s > 2
    assert again.term > won.term


@pytest.mark.parametrize("renewed", ["1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"])
async def test_clocks_of_others_are_not_believed(make: Make, kubernetes: KubernetesApi, renewed: str) -> None:
    """Whatever the holder's clock says, it is waited for from the moment at which this one sees it."""
    spec = {"holderIdentity": "gone", "leaseDurationSeconds": 3, "renewTime": renewed, "leaseTransitions": 7}
    kubernetes.create(NAMESPACE, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec,
                                  "metadata": {"name": "mooncache-masters"}})  # fmt: skip
    began_s = time.monotonic()
    await within((await make()).campaign())
    assert time.monotonic() - began_s > 3
    assert kubernetes.lease()["spec"]["leaseTransitions"] == 8


async def test_a_deleted_lease_lets_nobody_lead_beside_a_leader_that_does_not_know(
    make: Make, kubernetes: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await make(lease_s=4), await make()
    won = await within(first.campaign())
    standby = asyncio.ensure_future(second.campaign())
    await until(lambda: second._lease is not None and second._lease.holder.startswith("a_"))

    async def cut_off(*_: Any) -> None:
        await asyncio.sleep(0.5)
        raise MasterUnavailable("dropped on purpose")

    monkeypatch.setattr(first._api, "_call", cut_off)
    kubernetes.delete()
    again = await within(standby)
    assert won.lost.is_set()
    assert again.term > won.term


async def test_a_leader_that_gets_no_answer_is_replaced_only_after_it_knows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await make(), await make()
    won = await within(first.campaign())

    async def silent(*_: Any) -> None:
        await asyncio.sleep(WAIT_S)

    monkeypatch.setattr(first._api, "_call", silent)
    again = await within(second.campaign())
    monkeypatch.undo()
    assert won.lost.is_set()
    assert won.reason == "the Kubernetes API did not renew the lease in time"
    assert again.term > won.term


async def test_a_leader_whose_lease_was_deleted_begins_another_term(
    make: Make, kubernetes: KubernetesApi
) -> None:
    leader = await make()
    won = await within(leader.campaign())
    kubernetes.delete()
    await within(won.lost.wait())
    assert (await within(leader.campaign())).term > won.term


@pytest.mark.parametrize("made", [False, True])
async def test_a_first_election_waits_for_a_leader_that_it_cannot_know(
    make: Make, kubernetes: KubernetesApi, made: bool
) -> None:
    """The Lease may have been deleted, and made anew, under a leader that goes on until its next renewal."""
    kubernetes.delete()
    if made:
        metadata = {"name": "mooncache-masters"}
        kubernetes.create(
            NAMESPACE, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        )
    began_s = time.monotonic()
    await within((await make(lease_s=3)).campaign())
    assert time.monotonic() - began_s > 3


async def test_annotations_that_somebody_damaged_are_written_anew(
    make: Make, kubernetes: KubernetesApi
) -> None:
    leader = await make()
    won = await within(leader.campaign())
    for value in ("", "-1", "9" * 40, "٣"):
        kubernetes.edit(lambda lease, value=value: lease["metadata"]["annotations"].update({TERM: value}))  # type: ignore[misc]
        await until(lambda: kubernetes.lease()["metadata"]["annotations"][TERM] == str(won.term))
    kubernetes.edit(lambda lease: lease["metadata"].pop("annotations"))
    await until(lambda: LEADER in kubernetes.lease()["metadata"].get("annotations", {}))
    assert not won.lost.is_set()


async def test_candidates_that_are_gone_are_forgotten_and_other_annotations_stay(
    make: Make, kubernetes: KubernetesApi
) -> None:
    leader, other = await make(lease_s=1), await make(lease_s=1)
    await within(leader.campaign())
    dead = {member_name("dead"): json.dumps({"master_id": "dead", "grpc_target": "d:1"})}
    foreign = {member_name("x"): "{" * 5000, "example.com/note": "kept"}
    kubernetes.edit(lambda lease: lease["metadata"]["annotations"].update(dead | foreign))
    await until(lambda: listed(leader, ["a", "b", "dead"]))
    await until(lambda: listed(leader, ["a", "b"]))
    await until(lambda: listed(other, ["a", "b"]))
    notes = kubernetes.lease()["metadata"]["annotations"]
    assert notes["example.com/note"] == "kept"
    await until(lambda: member_name("x") not in kubernetes.lease()["metadata"]["annotations"])


async def listed(coordinator: LeaseCoordinator, names: list[str]) -> bool:
    return [record.master_id for record in await coordinator.masters()] == names


# --- answers that are none
# -----------------------------------------------------------------------------------------------------


def _wrong_lease(handler: Any) -> bool:
    body = {"kind": "Lease", "metadata": {"name": "another", "resourceVersion": "1"}, "spec": {}}
    return bool(handler.reply(200, json.dumps(body).encode()))


def _large_lease(handler: Any) -> bool:
    """All that is wrong with it is its size."""
    body = json.dumps(handler.server.api.lease()).encode()
    return bool(handler.reply(200, body.ljust(ANSWER_BYTES_MAX + 1)))


FAULTS: dict[str, Callable[[Any], bool]] = {
    "conflict": lambda handler: handler.refuse(409, "Conflict"),
    "gone": lambda handler: handler.refuse(410, "Expired", "too old resource version"),
    "busy": lambda handler: handler.refuse(429, "TooManyRequests"),
    "broken": lambda handler: handler.refuse(500, "InternalError"),
    "starting": lambda handler: handler.reply(503, b"etcd leader changed"),
    "invalid": lambda handler: handler.refuse(422, "Invalid"),
    "page": lambda handler: handler.reply(200, b"<html>sign in</html>"),
    "not found by a proxy": lambda handler: handler.reply(404, b"<html>404</html>"),
    "empty": lambda handler: handler.reply(200, b""),
    "list": lambda handler: handler.reply(200, b"[]"),
    "deep": lambda handler: handler.reply(200, b"[" * 200_000),
    "another lease": _wrong_lease,
    "large": _large_lease,
    "cut": lambda handler: handler.cut(),
    "half": lambda handler: handler.reply(200, b"{}", **{"Content-Encoding": "gzip"}) or handler.cut(),
    "slow": lambda handler: bool(time.sleep(0.3)),
}


async def test_an_answer_that_is_none_ends_no_leadership(make: Make, kubernetes: KubernetesApi) -> None:
    leader = await make(lease_s=4)
    won = await within(leader.campaign())
    for name, fault in FAULTS.items():
        kubernetes.faults.append(fault)
        await until(lambda: not kubernetes.faults)
        await renewals(kubernetes, 1)
        assert not won.lost.is_set(), name
        await until(lambda: leader.reachable)


@pytest.mark.parametrize("fault", ["gone", "page", "another lease", "large", "cut"])
async def test_a_server_that_only_talks_nonsense_ends_it_and_a_well_one_begins_it(
    make: Make, kubernetes: KubernetesApi, fault: str
) -> None:
    leader = await make(lease_s=1)
    won = await within(leader.campaign())
    kubernetes.every = FAULTS[fault]
    await within(won.lost.wait())
    again = asyncio.ensure_future(leader.campaign())
    await until(lambda: not leader.reachable)
    assert not again.done()
    kubernetes.every = None
    assert (await within(again)).term > won.term


async def test_an_answer_that_drips_has_a_deadline(make: Make, kubernetes: KubernetesApi) -> None:
    def drip(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        wait_until(lambda: handler.wfile.write(b" ") and kubernetes.every is None, every_s=0.05)
        return bool(handler.cut())

    leader = await make()
    won = await within(leader.campaign())
    kubernetes.every = drip
    await within(won.lost.wait())
    kubernetes.every = None
    assert (await within(leader.campaign())).term > won.term


async def test_the_token_is_not_carried_elsewhere(
    make: Make, kubernetes: KubernetesApi, tmp_path: Path
) -> None:
    with running_api(tmp_path / "elsewhere") as elsewhere:
        both = (kubernetes.folder / "ca.pem").read_bytes() + (elsewhere.folder / "ca.pem").read_bytes()
        (kubernetes.folder / "ca.crt").write_bytes(both)
        leader = await make()
        won = await within(leader.campaign())
        kubernetes.every = lambda handler: handler.reply(307, b"", Location=elsewhere.url + handler.path)
        await within(won.lost.wait())
        assert elsewhere.calls == []


# --- the account
# ----------------------------------------------------------------------------------------------------------------


async def test_a_token_that_is_replaced_is_read_again(make: Make, kubernetes: KubernetesApi) -> None:
    leader = await make(lease_s=4)
    won = await within(leader.campaign())
    kubernetes.tokens.add("second")
    kubernetes.write_token("second")
    await renewals(kubernetes, 1)
    kubernetes.tokens = {"second"}
    await renewals(kubernetes, 4)
    kubernetes.tokens = {"third"}  # refused for a moment, as when the kubelet is late
    await until(lambda: not leader.reachable)
    kubernetes.write_token("third")
    await renewals(kubernetes, 2)
    assert not won.lost.is_set()


async def test_a_token_that_is_refused_ends_leadership_and_is_named(
    make: Make, kubernetes: KubernetesApi
) -> None:
    leader = await make()
    won = await within(leader.campaign())
    kubernetes.tokens.clear()
    await within(won.lost.wait())
    with pytest.raises(Unauthenticated, match=r"refused the token of .*\(401\). It says: Unauthorized"):
        await leader.leader()


async def test_a_role_without_the_verb_is_named(make: Make, kubernetes: KubernetesApi) -> None:
    kubernetes.verbs = set()
    kubernetes.delete()
    candidate = await make()
    with pytest.raises(
        Unauthenticated, match=r"may not read the Lease models/mooncache-masters \(403\): its Role needs"
    ):
        await candidate.leader()
    kubernetes.verbs = {"get", "update"}  # the chart makes the Lease, so nobody has to create one
    campaign = asyncio.ensure_future(candidate.campaign())
    await until(lambda: ("create", kubernetes.calls[-1][1]) in kubernetes.calls)
    assert not campaign.done()
    made = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "mooncache-masters"},
    }
    kubernetes.create(NAMESPACE, made)
    assert (await within(campaign)).term > 0


async def test_another_authority_is_refused_until_its_file_is_there(
    make: Make, kubernetes: KubernetesApi
) -> None:
    good = (kubernetes.folder / "ca.crt").read_bytes()
    foreign = make_certificates(kubernetes.folder / "foreign", ["127.0.0.1"])[0]
    (kubernetes.folder / "ca.crt").write_bytes((foreign / "ca.pem").read_bytes())
    candidate = await make()
    with pytest.raises(MasterUnavailable, match="certificate"):
        await candidate.leader()
    assert kubernetes.calls == []
    campaign = asyncio.ensure_future(candidate.campaign())
    for text in (b"", b"-----BEGIN CERTIFICATE-----\n?\n", b"\xff"):
        (kubernetes.folder / "ca.crt").write_bytes(text)
        api = LeaseApi(section_for(kubernetes), "x", {})
        with pytest.raises(ConfigInvalid, match=r"ca\.crt is not a PEM file"):
            await api.get(5.0)
        await api.close()
    (kubernetes.folder / "ca.crt").write_bytes(good)
    assert (await within(campaign)).term > 0


@pytest.mark.parametrize("token", ["", "a\nb", "ü", "\x00", "x" * (1 << 20) + "y"])
async def test_a_token_that_is_none_is_refused_before_anything_is_sent(
    kubernetes: KubernetesApi, token: str
) -> None:
    api = LeaseApi(section_for(kubernetes), "x", {})
    kubernetes.write_token(token)
    with pytest.raises(Unauthenticated):
        await api.get(5.0)
    (kubernetes.folder / "token").unlink()
    with pytest.raises(Unauthenticated, match="cannot be read"):
        await api.get(5.0)
    assert kubernetes.calls == []
    await api.close()


def test_the_address_comes_from_the_pod_or_the_settings(kubernetes: KubernetesApi) -> None:
    def endpoint(given: str, **env: str) -> str:
        return LeaseApi(section_for(kubernetes, kubernetes_api=given), "x", env).endpoint

    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert endpoint("", **pod) == "https://10.0.0.1:6443"
    assert endpoint("", KUBERNETES_SERVICE_HOST="fd00::1") == "https://[fd00::1]:443"
    assert endpoint("https://api.example:6443/", **pod) == "https://api.example:6443"
    assert endpoint("http://127.0.0.1:8001") == "http://127.0.0.1:8001"
    wrong = ("", "http://10.0.0.1:8001", "ftp://x", "https://", "https://u:p@x", "https://x/path", "https://x:0",
             "https://x:99999", "https://[", "x:1", "https://x?y")  # fmt: skip
    for address in wrong:
        with pytest.raises(ConfigInvalid):
            endpoint(address)


def test_the_namespace_comes_from_the_pod_or_the_settings(kubernetes: KubernetesApi) -> None:
    assert LeaseApi(section_for(kubernetes), "x", {}).namespace == NAMESPACE
    assert LeaseApi(section_for(kubernetes, lease_namespace="other"), "x", {}).namespace == "other"
    for text in ("", "a/b", "a" * 300, "-"):
        (kubernetes.folder / "namespace").write_text(text)
        with pytest.raises(ConfigInvalid):
            LeaseApi(section_for(kubernetes), "x", {})
    (kubernetes.folder / "namespace").unlink()
    with pytest.raises(ConfigInvalid, match=r"set coordination\.lease_namespace"):
        LeaseApi(section_for(kubernetes), "x", {})


def test_configuration_chooses(kubernetes: KubernetesApi, tmp_path: Path) -> None:
    overrides = {"coordination.backend": "lease", "coordination.kubernetes_api": kubernetes.url}
    overrides |= {"coordination.kubernetes_account": str(kubernetes.folder), "coordination.lease_name": "big"}
    coordinator = make_coordinator(configuration.load(env={}, overrides=overrides), SystemClock())
    assert isinstance(coordinator, LeaseCoordinator)
    assert coordinator._api.name == "big-masters"


# --- the object
# -----------------------------------------------------------------------------------------------------------------

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_spec = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("holderIdentity", "leaseDurationSeconds", "renewTime", "leaseTransitions"), _json
    ),
)
_notes = st.dictionaries(st.sampled_from([TERM, LEADER, member_name("a"), "other"]), _json, max_size=4)
_lease = st.fixed_dictionaries(
    {"kind": st.just("Lease"), "spec": _spec | _json,
     "metadata": st.fixed_dictionaries({"name": st.just("x"), "resourceVersion": st.text(max_size=4) | _json,
                                        "annotations": _notes | _json})}
)  # fmt: skip


@given(st.binary(max_size=64) | (_json | _lease).map(lambda found: json.dumps(found).encode()))
def test_any_bytes_are_a_lease_or_refused(body: bytes) -> None:
    try:
        lease = lease_of(body, "x")
    except MasterUnavailable:
        return
    assert 0 <= lease.term < 10**18
    assert 0 <= lease.duration_s <= 600
    assert lease.leader is None or lease.holder
    assert lease.members.keys() <= lease.annotations.keys()
    again = lease_of(json.dumps(changed(lease, {"holderIdentity": "me"}, {TERM: "7"})).encode(), "x")
    assert (again.holder, again.term, again.version) == ("me", 7, lease.version)


def test_what_is_not_known_stays_in_a_changed_object() -> None:
    raw = {"kind": "Lease", "metadata": {"name": "x", "resourceVersion": "4", "uid": "u", "labels": {"a": "b"}},
           "spec": {"strategy": "Later", "holderIdentity": "h"}}  # fmt: skip
    made = changed(lease_of(json.dumps(raw).encode(), "x"), {"holderIdentity": None}, {TERM: "1"})
    assert made["spec"] == {"strategy": "Later"}
    assert made["metadata"] == raw["metadata"] | {"annotations": {TERM: "1"}}  # type: ignore[operator]


def test_times_are_written_as_kubernetes_reads_them() -> None:
    assert micro_time(0) == "1970-01-01T00:00:00.000000Z"
    assert micro_time(1_795_746_488_000_012) == "2026-11-27T02:28:08.000012Z"


def test_a_leadership_ends_by_the_clock_also_when_nobody_says_so() -> None:
    leadership = Leadership(1, until_s=10.0)
    assert leadership.holds(9.9)
    assert not leadership.holds(10.0)
    leadership.end("x")
    assert not leadership.holds(1.0)
