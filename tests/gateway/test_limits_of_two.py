"""Limits of tenants over two gateways, as processes with a conductor: held under a flood, also while it is gone."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from mooncache.accounts.core.request_limits import HolderLimits
from mooncache.accounts.core.spending import LedgerRow
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.limit_store import LimitStore
from mooncache.accounts.months import month_of
from mooncache.accounts.place import accounts_at, close_accounts
from mooncache.accounts.spending_store import SpendingStore
from mooncache.auth import engine_key, tenant_token
from mooncache.bench.gateway.stack import Stack, start_stack
from mooncache.bench.null_engine import NullEngine, NullEngineOptions
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.processes import Part, ServiceKind, stop_all
from mooncache.config import load
from mooncache.config.accounts_place import place_of
from mooncache.errors import MooncacheError
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.accounts.postgres_server import postgres_server
from tests.conditions import until, wait_until
from tests.ports import own_port

pytestmark = pytest.mark.timeout(300)
LIMIT, PER_MINUTE, MODEL = 8, 30, "slow"
KEYS = tuple(f"sk-rates-{number}" for number in range(4))  # each of a tenant of its own
BUDGET, COST_MAX = 120.0, 30.0  # a request of ask() costs its few tokens
ANSWER_S = 0.3


@dataclass(frozen=True, slots=True)
class TwoGateways:
    """A running system, and the ports of its gateways."""

    stack: Stack
    ports: tuple[int, int]
    second: Part
    accounts: tuple[AccountsPlace, ...]

    @property
    def team(self) -> str:
        return tenant_token(self.stack.token, "team").text


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoGateways]:
    with _running(tmp_path_factory.mktemp("two"), "") as found:
        yield found


@pytest.fixture
def sharing_system(tmp_path: Path) -> Iterator[TwoGateways]:
    """Both gateways have their accounts in one database."""
    with postgres_server() as server, _running(tmp_path, server.new_database()) as found:
        yield found


@contextmanager
def _running(folder: Path, url: str) -> Iterator[TwoGateways]:
    """url: of the database of accounts; "": each gateway has files of its own, as if of two hosts."""
    keys = folder / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text("".join(map(_key_entry, KEYS)))
    prices = folder / "prices.toml"
    prices.write_text("[[cost.tokens]]\ninput_per_million = 1e6\noutput_per_million = 1e6\n")
    settings = {
        "MOONCACHE_GATEWAY_TENANT_REQUEST_COUNT_MAX": str(LIMIT),
        "MOONCACHE_GATEWAY_KEYS_FILE": str(keys),
        "MOONCACHE_GATEWAY_PRICE_FILE": str(prices),
        "MOONCACHE_CONDUCTOR_SUSPECT_AFTER_S": "20",
        "MOONCACHE_CONDUCTOR_LEASE_S": "60",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with start_stack() as stack:
            places = (url,) if url else (str(stack.state_dir / "accounts"), str(folder / "accounts"))
            accounts = tuple(accounts_at(place_of(each)) for each in places)  # type: ignore[arg-type]
            for each in accounts:
                with LimitStore(each, create=True) as store:
                    store.set("payer", "", HolderLimits(money_per_month=BUDGET))
            # The stack's own gateway has files. With a database it stands by, and two others have that.
            more = [
                _gateway(stack, folder, number, settings, places[-1]) for number in range(2 if url else 1)
            ]
            stack.conductors[0].env.update(settings)  # type: ignore[attr-defined]
            try:
                for part in more:
                    part.start()
                ports = tuple(int(part.env["MOONCACHE_GATEWAY_PORT"]) for part in more)
                for port, part in zip(ports, more, strict=True):
                    wait_until(partial(_listens, port), part.log_path.read_text)
                first = ports[0] if url else stack.gateway.port
                yield TwoGateways(stack, (first, ports[-1]), more[-1], accounts)
            finally:
                stop_all(more, 8.0)
                for each in accounts:
                    close_accounts(each)


def _key_entry(key: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[key]]\nsha256 = "{digest}"\ntenant = "of-{key}"\nrequests_per_minute = {PER_MINUTE}\n'


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _gateway(stack: Stack, folder: Path, number: int, settings: dict[str, str], accounts: str) -> Part:
    own = {"MOONCACHE_GATEWAY_PORT": str(own_port()), "MOONCACHE_CLUSTER_ACCOUNTS_DIR": accounts}
    name = f"gateway-{number + 2}"
    return Part(name, ServiceKind.GATEWAY, {**stack.env, **settings, **own}, folder / f"{name}.log")


@dataclass
class SlowEngine:
    """An engine in this process, whose requests under way are seen: those of all gateways together."""

    engine: NullEngine
    most: int = 0

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, self.engine.open_count)
            await asyncio.sleep(0.002)


@asynccontextmanager
async def slow_engine(system: TwoGateways) -> AsyncIterator[SlowEngine]:
    stack = system.stack
    engine = NullEngine(
        NullEngineOptions(model=MODEL, key=engine_key(stack.token), first_token_s=ANSWER_S, tokens=1)
    )
    await engine.start()
    slow = SlowEngine(engine)
    instance = pb.Instance(
        instance_id=f"{MODEL}-{engine.port}",
        incarnation=1,
        role=pb.INSTANCE_ROLE_BOTH,
        state=pb.INSTANCE_STATE_READY,
        engine="null",
        url=f"http://127.0.0.1:{engine.port}",
        model=MODEL,
        max_model_tokens=1 << 16,
        max_sequences=256,
    )
    tasks = [asyncio.create_task(slow.watch()), asyncio.create_task(_register(stack, instance))]
    try:
        yield slow
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()


async def _register(stack: Stack, instance: pb.Instance) -> None:
    link = ConductorLink(stack.conductor_target, stack.token.text, load(env={}))
    report = pb.ReportInstanceRequest(
        instance_id=instance.instance_id, incarnation=1, state=pb.INSTANCE_STATE_READY
    )
    while True:
        try:
            await link.call("ReportInstance", report, pb.ReportInstanceResponse, 5.0)
        except MooncacheError:
            try:
                request = pb.RegisterInstanceRequest(instance=instance)
                await link.call("RegisterInstance", request, pb.RegisterInstanceResponse, 5.0)
            except MooncacheError:
                pass  # it is gone; it comes back
        await asyncio.sleep(0.25)


@dataclass
class Flood:
    """Clients of one tenant at one gateway, more than the limit; what they got."""

    port: int
    key: str
    served: int = 0
    refusals: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def flowing(self, http: aiohttp.ClientSession, clients: int = 12) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._client(http)) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        broken = [each for each in found if not isinstance(each, asyncio.CancelledError)]
        assert not broken, broken

    def was_told(self, words: str) -> bool:
        """Whether a refusal had these words."""
        return any(words in text for text in self.refusals)

    def is_shared_again(self) -> bool:
        """Whether the last refusal does not speak of a missing conductor."""
        return bool(self.refusals) and "does not answer" not in self.refusals[-1]

    async def ask(self, http: aiohttp.ClientSession) -> int:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
        headers = {"authorization": f"Bearer {self.key}"}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        async with http.post(url, json=body, headers=headers) as answer:
            if answer.status == 200:
                self.served += 1
            elif answer.status == 429:
                assert int(answer.headers["retry-after"]) >= 1
                self.refusals.append((await answer.json())["error"]["message"])
            elif answer.status not in (404, 503):  # the list of instances is on its way
                raise AssertionError(await answer.text())
            return answer.status

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while True:
            await self.ask(http)
            await asyncio.sleep(0.03)


async def both_know(system: TwoGateways, http: aiohttp.ClientSession) -> None:
    """Return when both gateways serve the model and share limits: a refusal of each says so."""
    for port in system.ports:
        flood = Flood(port, system.team)
        async with flood.flowing(http):
            await until(partial(flood.was_told, "over all gateways"), f"{port} shares its limits")


async def test_a_limit_holds_over_both_gateways_also_while_no_conductor_is_there(
    system: TwoGateways, http: aiohttp.ClientSession
) -> None:
    first, second = (Flood(port, system.team) for port in system.ports)
    [conductor] = system.stack.conductors
    async with slow_engine(system) as slow:
        await both_know(system, http)
        await slow.engine.idle.wait()
        slow.most = 0
        async with first.flowing(http), second.flowing(http):
            await until(lambda: min(first.served, second.served) >= 20, "both serve the tenant")
            await until(lambda: slow.most == LIMIT, "the whole limit is used")
            conductor.send(signal.SIGKILL)
            for flood in (first, second):
                await until(partial(flood.was_told, "does not answer"), "a gateway has its fair share")
            served = first.served, second.served
            await until(lambda: first.served > served[0] + 10 and second.served > served[1] + 10)
            assert slow.most <= LIMIT
            conductor.wait(10.0)
            conductor.start()
            for flood in (first, second):
                await until(flood.is_shared_again, "slices come from the conductor again")
        await slow.engine.idle.wait()
        assert slow.most <= LIMIT
        slow.most = 0
        async with first.flowing(http):
            await until(lambda: slow.most == LIMIT, "the share of the idle gateway is back")
        assert slow.most <= LIMIT


async def _answers(stack: Stack) -> bool:
    link = ConductorLink(stack.conductor_target, stack.token.text, load(env={}))
    try:
        await link.call("ListInstances", pb.ListInstancesRequest(), pb.ListInstancesResponse, 2.0)
    except MooncacheError:
        return False
    return True


async def _served(flood: Flood, http: aiohttp.ClientSession) -> None:
    async def is_answered() -> bool:
        return await flood.ask(http) not in (404, 503)  # the list of instances is on its way

    await until(is_answered, "the gateway knows the instances", every_s=0.05)


async def test_a_new_tenant_waits_for_a_conductor_that_starts(
    system: TwoGateways, http: aiohttp.ClientSession
) -> None:
    """It may not give slices yet, because it does not know those of before: that is no reason for a refusal."""
    [conductor] = system.stack.conductors
    async with slow_engine(system):
        await both_know(system, http)
        conductor.send(signal.SIGKILL)
        conductor.wait(10.0)
        conductor.start()
        key = tenant_token(system.stack.token, "new").text
        floods = [Flood(port, key) for port in system.ports]
        await until(partial(_answers, system.stack), "the conductor answers")
        await asyncio.gather(*(_served(flood, http) for flood in floods for _ in range(2)))
        assert [flood.refusals for flood in floods] == [[], []]


async def test_requests_a_minute_hold_over_both_gateways(
    system: TwoGateways, http: aiohttp.ClientSession
) -> None:
    """On a busy machine a gateway may take the conductor for lost, and uses its share: then another key is tried."""
    async with slow_engine(system):
        await both_know(system, http)
        for key in KEYS:
            floods = [Flood(port, key) for port in system.ports]
            began_s = time.monotonic()
            for _ in range(6):  # fewer at a time than the limit on requests under way
                statuses = await asyncio.gather(*(flood.ask(http) for flood in floods for _ in range(3)))
            while 429 not in statuses:
                statuses = await asyncio.gather(*(flood.ask(http) for flood in floods for _ in range(3)))
            passed_s = time.monotonic() - began_s
            served = sum(flood.served for flood in floods)
            assert served <= PER_MINUTE * (1 + passed_s / 60) + 1e-6
            if not any(flood.was_told("does not answer") for flood in floods):
                break
            await both_know(system, http)
    assert served >= PER_MINUTE - 1, floods
    texts = {text.partition(" Please")[0] for flood in floods for text in flood.refusals}
    assert texts == {f"Rate limit reached: {PER_MINUTE} requests per minute over all gateways."}


def _spent(system: TwoGateways) -> float:
    """What is written in all ledgers."""
    month, total = month_of(time.time()), 0.0
    for place in system.accounts:
        with SpendingStore(place) as store:
            total += store.of_month(month).get("payer", LedgerRow()).own
    return total


async def test_one_budget_of_two_hosts_outlives_a_gateway_and_the_conductor(
    system: TwoGateways, http: aiohttp.ClientSession
) -> None:
    await _spend_all(system, http)


async def test_one_budget_in_one_database_is_spent_once(
    sharing_system: TwoGateways, http: aiohttp.ClientSession
) -> None:
    await _spend_all(sharing_system, http)
    with SpendingStore(sharing_system.accounts[0]) as store:
        assert store.of_month(month_of(time.time()))["payer"].others == 0, "no other ledger has anything"


async def _spend_all(system: TwoGateways, http: aiohttp.ClientSession) -> None:
    """Two gateways race for the budget; one of them and the conductor are killed meanwhile."""
    key = tenant_token(system.stack.token, "payer").text
    first, second = (Flood(port, key) for port in system.ports)
    [conductor] = system.stack.conductors
    async with slow_engine(system):
        await both_know(system, http)
        async with first.flowing(http, 1), second.flowing(http, 1):
            await until(
                lambda: min(first.served, second.served) >= 1 and _spent(system) > 0, "both have spent"
            )
        system.second.send(signal.SIGKILL)
        conductor.send(signal.SIGKILL)
        for ended in (system.second, conductor):
            ended.wait(10.0)
            ended.start()
        await until(partial(_answers, system.stack), "the conductor answers")
        for flood in (first, second):
            await until(partial(_is_up, flood, http), "the gateway answers", every_s=0.05)
        async with first.flowing(http, 2), second.flowing(http, 2):
            for flood in (first, second):
                await until(
                    partial(flood.was_told, "It begins anew at"), f"{flood.port} has heard that it is spent"
                )
        served = first.served, second.served
        assert [await flood.ask(http) for flood in (first, second)] == [429, 429]
    assert served == (first.served, second.served)
    await until(lambda: _spent(system) >= BUDGET, "the last costs are written")
    # The last request of each gateway may go beyond; what the one that was killed had not written is on no account.
    assert _spent(system) <= BUDGET + 2 * COST_MAX


async def _is_up(flood: Flood, http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get(f"http://127.0.0.1:{flood.port}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
