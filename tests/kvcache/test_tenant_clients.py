"""Clients of tenants: one for each session token, kept while they are used; movers and waits use them."""

from __future__ import annotations

import pytest

from mooncache.client.results import WatchState
from mooncache.errors import Unauthenticated
from mooncache.kvcache.lookup import LookupOutcome, LookupRequest, Lookups
from mooncache.kvcache.mover import Mover
from mooncache.kvcache.pool_link import PoolLink
from mooncache.kvcache.tenant_clients import CALL_MAX_S, CLIENTS_KEPT, CLIENTS_MAX, TenantClients
from mooncache.kvcache.transfers import TransferJob
from mooncache.kvcache.watcher import WATCHERS_KEPT, Watcher
from tests.conditions import wait_until
from tests.kvcache.conftest import WAIT_S, Engine
from tests.kvcache.faulty import FaultyPool


class Parent:
    """Makes clients, and fails for one token."""

    def __init__(self, token: str = "") -> None:
        self.token, self.closed = token, False
        self.made: list[Parent] = []

    def make(self, token: str) -> Parent:
        if token == "bad":
            raise Unauthenticated("no session token")
        self.made.append(Parent(token))
        return self.made[-1]

    def stats(self) -> dict[str, int]:
        return {"gets": 1, "rdma_rail_0_up": 1}

    def close(self) -> None:
        self.closed = True


def test_one_client_for_each_token() -> None:
    prepared: list[Parent] = []
    parent, clients = Parent(), TenantClients(Parent.make, prepared.append)
    a = clients.client(parent, "a")
    assert clients.client(parent, "a") is a
    assert clients.client(parent, "b") is not a
    assert clients.client(parent, "bad") is None
    assert prepared == parent.made, "memory is registered before anything moves"
    assert clients.stats(parent.stats()) == {"gets": 3, "rdma_rail_0_up": 1}
    clients.close()
    assert all(made.closed for made in parent.made)
    assert clients.client(parent, "c") is None, "after the end there is none"


def test_clients_go_when_no_call_can_use_them() -> None:
    now_s = 0.0
    parent = Parent()
    clients = TenantClients(Parent.make, now_s=lambda: now_s)
    for number in range(CLIENTS_MAX):
        assert clients.client(parent, f"t{number}") is not None
    assert clients.client(parent, "one more") is None, "there is a limit"
    assert not any(made.closed for made in parent.made)
    now_s = CALL_MAX_S
    assert clients.client(parent, f"t{CLIENTS_MAX - 1}") is parent.made[-1]
    assert clients.client(parent, "one more") is parent.made[-1]
    assert sum(made.closed for made in parent.made) == CLIENTS_MAX - CLIENTS_KEPT + 1
    assert clients.stats({})["gets"] == CLIENTS_MAX + 1, "what they counted stays"


@pytest.fixture
def tenant(faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch) -> FaultyPool:
    """The pool as the tenant of the token `moon` sees it."""
    found = FaultyPool()

    def for_tenant(token: str) -> FaultyPool:
        assert token == "moon"
        return found

    monkeypatch.setattr(faulty, "for_tenant", for_tenant, raising=False)
    return found


def test_saves_and_loads_are_the_tenants(
    faulty: FaultyPool, faulty_link: PoolLink, tenant: FaultyPool
) -> None:
    engine = Engine()
    engine.fill(0, 7)
    mover = Mover(
        faulty_link, engine.memory, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S, save_queue_bytes_max=1 << 20
    )
    key = b"k" * 32
    mover.save(TransferJob("save", (key,), (0,), session_token="moon"))
    wait_until(lambda: key in tenant.blocks, "it is saved")
    assert not faulty.blocks
    mover.load(TransferJob("load", (key,), (3,), session_token="moon"))
    wait_until(lambda: engine.block(3) == engine.block(0), "it is loaded")
    assert "get" not in faulty.calls
    mover.close()


def test_lookups_and_waits_are_the_tenants(
    faulty: FaultyPool, faulty_link: PoolLink, tenant: FaultyPool
) -> None:
    lookups, key = Lookups(faulty_link), b"k" * 32
    tenant.blocks[key] = b"x"
    for name, token, present in (("own", "", (False,)), ("tenant", "moon", (True,))):
        lookups.ask(LookupRequest(name, key, session_token=token))
        answers: list[object] = []

        def answered(name: str = name, answers: list[object] = answers) -> bool:
            answers.extend(filter(None, [lookups.take(name)]))
            return bool(answers)

        wait_until(answered, "an answer")
        found = answers[0]
        assert getattr(found, "outcome") is LookupOutcome.FOUND  # noqa: B009
        assert getattr(found, "present") == present  # noqa: B009
    lookups.close()


def test_watchers_of_tenants_that_wait_for_nothing_go(faulty: FaultyPool, tenant: FaultyPool) -> None:
    heard: list[WatchState] = []

    class Link:
        def client(self, session_token: str = "") -> None:
            return None

        def failed(self, call: object, error: Exception) -> None:
            raise AssertionError(error)

    watcher = Watcher(Link())  # type: ignore[arg-type]
    for number in range(3 * WATCHERS_KEPT):
        watcher.add(
            b"k" * 32, lambda _, state: heard.append(state), timeout_s=WAIT_S, session_token=f"t{number}"
        )
        wait_until(lambda: not watcher.waiting, "without a pool it ends at once")
    assert heard == [WatchState.UNREACHABLE] * 3 * WATCHERS_KEPT
    assert len(watcher._tenants) == WATCHERS_KEPT
    watcher.close()
