"""The console of a real gateway over HTTP: who gets in, what it shows, and that viewers cost the cluster little."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncache.errors import DecisionUnknown, InvalidArgument, PlanInvalid
from mooncache.gateway.console import collector as collecting
from mooncache.gateway.console.files import page_files
from mooncache.gateway.console.viewers import EVENTS_MAX, Topic, Viewers
from mooncache.gateway.core.console_session import COOKIE
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext, Op
from tests.conditions import WAIT_S, until
from tests.gateway.stand_in import Bench, FakeEngine, running
from tests.gateway.test_console_core import record

HOSTILE = "<img src=x onerror=alert(1)>"


class Answers:
    """What the conductor says to the console, and how often it was asked."""

    def __init__(self, bench: Bench) -> None:
        self.records = [record(number) for number in reversed(range(5))]
        self.asked: list[str] = []
        runner = bench.conductor.runner
        assert runner is not None
        ops = runner.table.ops
        for name, answer in (
            ("ListDecisions", self._list),
            ("GetDecision", self._get),
            ("GetConductorStatus", self._status),
        ):
            ops[name] = Op(ops[name].method, answer, ops[name].admin_only)

    async def _list(
        self, _state: Any, request: pb.ListDecisionsRequest, _context: CallContext
    ) -> pb.ListDecisionsResponse:
        self.asked.append("ListDecisions")
        names = [each["decision_id"] for each in self.records]
        first = names.index(request.before) + 1 if request.before in names else 0
        page = self.records[first : first + (request.count or 256)]
        return pb.ListDecisionsResponse(records_json=[json.dumps(each) for each in page], kept_max=10_000)

    async def _get(
        self, _state: Any, request: pb.GetDecisionRequest, _context: CallContext
    ) -> pb.GetDecisionResponse:
        self.asked.append(f"GetDecision {request.policy}")
        if request.policy == "nonsense":
            raise InvalidArgument("There is no policy nonsense.")
        for each in self.records:
            if request.id in (each["decision_id"], each["request_id"]):
                return pb.GetDecisionResponse(record_json=json.dumps({**each, "misses": []}))
        raise DecisionUnknown("No such decision is kept here.")

    async def _status(
        self, _state: Any, _request: pb.GetConductorStatusRequest, _context: CallContext
    ) -> pb.GetConductorStatusResponse:
        self.asked.append("GetConductorStatus")
        return pb.GetConductorStatusResponse(policy="mooncache", admission=True, decisions={"admitted": 5})


@contextlib.asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[Bench, Answers]]:
    # The port of the master is one where nothing listens: the pool is silent, and everything else is shown.
    async with running(
        folder, [FakeEngine("e")], cluster__master_targets=("127.0.0.1:1",), **settings
    ) as bench:
        yield bench, Answers(bench)


def bearer(bench: Bench) -> dict[str, str]:
    return {"authorization": f"Bearer {bench.gateway.token.text}"}


async def sign_in(bench: Bench, http: aiohttp.ClientSession) -> str:
    async with http.post(bench.url + "/console/session", headers=bearer(bench)) as response:
        assert response.status == 200
        return response.headers["set-cookie"].split(";")[0]


async def first_event(response: aiohttp.ClientResponse) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        async for line in response.content:
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
    raise AssertionError("the stream ended without an event")


async def test_the_page_and_its_files(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, _):
        for path in ("/console", "/console/", *(f"/console/static/{name}" for name in page_files())):
            async with http.get(bench.url + path) as response:
                assert response.status == 200, path
                assert await response.read()
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["x-frame-options"] == "DENY"
                assert response.headers["x-content-type-options"] == "nosniff"
                tag = response.headers["etag"]
            async with http.get(bench.url + path, headers={"if-none-match": tag}) as response:
                assert response.status == 304
        for path in (
            "/console/static/none.js",
            "/console/static/..%2fconsole.py",
            "/console/static/__init__.py",
        ):
            async with http.get(bench.url + path) as response:
                assert response.status == 404, path


def test_the_files_have_nothing_inline_and_nothing_from_elsewhere() -> None:
    files = page_files()
    assert {"index.html", "style.css", "app.js"} <= files.keys()
    for name, file in files.items():
        text = file.body.decode()
        assert "innerHTML" not in text, name
        assert "insertAdjacentHTML" not in text, name
        assert "document.write" not in text, name
        outside = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in outside, name
        assert "https://" not in outside, name
        if name.endswith(".html"):
            assert "style=" not in text
            assert "<script>" not in text
            assert " on" not in text.partition("<body>")[2].replace(" on ", "")


async def test_signing_in_and_out(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, _):
        session = bench.url + "/console/session"
        async with http.get(session) as response:
            assert (await response.json())["signed_in"] is False
        async with http.post(session, headers=bearer(bench)) as response:
            flags = response.headers["set-cookie"].split("; ")
            assert {"HttpOnly", "SameSite=Strict", "Path=/console"} <= set(flags)
            assert bench.gateway.token.text not in response.headers["set-cookie"]
            assert (await response.json())["who"] == "the cluster token"
        cookie = {"cookie": flags[0]}
        async with http.get(session, headers=cookie) as response:
            said = await response.json()
            assert said["signed_in"] is True
            assert "mooncache" in said["policies"]
        async with http.delete(session, headers=cookie) as response:
            assert response.headers["set-cookie"].startswith(f"{COOKIE}=; ")


async def test_who_does_not_get_in(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, answers):
        session = bench.url + "/console/session"
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer mcc1." + "0" * 64}, 401),
            ({**bearer(bench), "sec-fetch-site": "cross-site"}, 403),
        ):
            async with http.post(session, headers=headers) as response:
                assert response.status == status, headers
                assert "set-cookie" not in response.headers
        for path in ("/console/live?topic=overview", "/console/decision?id=d-1", "/console/configuration"):
            for headers in ({}, {"cookie": f"{COOKIE}=mcv1.cluster.1.2.{'0' * 64}"}):
                async with http.get(bench.url + path, headers=headers) as response:
                    assert response.status == 401, path
            async with http.get(bench.url + path, headers=bench.auth()) as response:
                assert response.status == 403, path
                assert "console = true" in (await response.json())["error"]["message"]
        assert not answers.asked


async def test_a_key_of_the_operators_own_opens_it_until_it_is_taken_away(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    digest = hashlib.sha256(b"sk-look").hexdigest()
    path.write_text(f'[[key]]\nsha256 = "{digest}"\ntenant = "ops"\nconsole = true\n')
    async with served(tmp_path / "state", gateway__keys_file=path) as (bench, _):
        keys = {"authorization": "Bearer sk-look"}
        async with http.post(bench.url + "/console/session", headers=keys) as response:
            assert response.status == 200
            cookie = response.headers["set-cookie"].split(";")[0]
            assert digest not in cookie
        decision = bench.url + "/console/decision?id=d-1"
        async with http.get(decision, headers={"cookie": cookie}) as response:
            assert response.status == 200
        async with http.post(bench.url + "/agreement", headers=keys) as response:
            assert response.status == 403  # it only shows the console
        path.write_text(f'[[key]]\nsha256 = "{digest}"\ntenant = "ops"\n')
        await until(lambda: not bench.gateway.state.keyring.opens_console(digest[:32]))
        async with http.get(decision, headers={"cookie": cookie}) as response:
            assert response.status == 401


async def test_the_switch_takes_all_of_it_away(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path, gateway__console=False) as (bench, _):
        for path in ("/console", "/console/session", "/console/static/app.js", "/console/live"):
            async with http.get(bench.url + path, headers=bearer(bench)) as response:
                assert response.status == 404, path
        assert bench.gateway.state.console is None


async def test_what_pages_show_live(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, answers):
        now_s = bench.gateway.state.clock.wall_s()
        for each in answers.records:
            each.update(made_at_s=now_s - 5, tenant=HOSTILE)
        cookie = {"cookie": await sign_in(bench, http)}
        found = {}
        for topic in Topic:
            async with http.get(f"{bench.url}/console/live?topic={topic}", headers=cookie) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                found[topic] = await first_event(response)
        overview = found[Topic.OVERVIEW]
        assert overview["figures"]["requests"] == 5
        assert overview["figures"]["hit_share"] == 0.8
        assert sum(step["requests"] for step in overview["series"]) == 5
        assert overview["instances"] == {"count": 1, "state": {"ready": 1}, "role": {"both": 1}}
        assert overview["conductor"]["policy"] == "mooncache"
        assert set(overview["silent"]) == {"pool"}  # no master is there, and a sentence says so
        rows = found[Topic.REQUESTS]["requests"]
        assert [row["decision_id"] for row in rows] == ["d-4", "d-3", "d-2", "d-1", "d-0"]
        assert rows[0]["tenant"] == HOSTILE  # as it is: pages insert text, never HTML
        assert found[Topic.INSTANCES]["instances"][0]["id"] == "e"
        assert found[Topic.POOL]["nodes"] is None
        async with http.get(f"{bench.url}/console/live?topic=secrets", headers=cookie) as response:
            assert response.status == 400


PRICES = """
[cost]
currency = "EUR"
[[cost.engine]]
instances = "*"
gpus = 0
[[dram]]
gb = 500
price_per_hour = 0.5
"""


async def test_money_of_requests(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Without a price book there is none; with one its currency, what was spent and saved, and what has no price."""
    span = {"leg": "prefill", "instance": "e", "part": "compute", "from_ms": 0.0, "to_ms": 100.0}
    path = tmp_path / "prices.toml"
    path.write_text(PRICES.replace("[[cost.engine]]", "processor_price_per_hour = 36.0\n[[cost.engine]]"))
    for settings, currency, spent, saved in (
        ({}, None, None, None),
        ({"gateway__price_file": path}, "EUR", 4 * 36 * 0.1 / 3600, 4 * 36 * 0.3 / 3600),
    ):
        async with served(tmp_path / f"state-{currency}", **settings) as (bench, answers):
            now_s = bench.gateway.state.clock.wall_s()
            for each in answers.records:
                each.update(made_at_s=now_s, spans=[span], chosen={"prefill": "e", "decode": "e"})
            answers.records[0].update(prompt_tokens="many", spans=[{"part": HOSTILE}])
            cookie = {"cookie": await sign_in(bench, http)}
            live = bench.url + "/console/live?topic=overview"
            async with http.get(live, headers=cookie) as response:
                look = await first_event(response)
            async with http.get(f"{bench.url}/console/decision?id=d-3", headers=cookie) as response:
                cost = (await response.json()).get("cost")
        figures = look["figures"]
        assert (cost is None) == (currency is None)
        if cost is not None:
            one = 36 * 0.1 / 3600  # 100 ms of 400 ms were computed
            assert (cost["currency"], cost["generating"], cost["network"]) == ("EUR", 0.0, 0.0)
            assert (cost["computing"], cost["total"]) == (pytest.approx(one), pytest.approx(one))
            assert cost["saved"]["total"] == pytest.approx(3 * one)
            assert any("ssd" in remark for remark in cost["remarks"])
        assert (look["currency"], figures["cost"], figures["saved_cost"]) == (
            currency,
            spent if spent is None else pytest.approx(spent),
            saved if saved is None else pytest.approx(saved),
        )
        assert any("ssd" in hole for hole in look["price_holes"]) is (currency is not None)
        assert look["paybacks"] == []  # no master says how large the pool is


async def test_a_wrong_price_book_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[cost]\ncurency = 'EUR'\n")
    with pytest.raises(PlanInvalid, match="curency"):
        async with served(tmp_path / "state", gateway__price_file=path):
            pass


async def test_the_record_of_a_request(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, answers):
        cookie = {"cookie": await sign_in(bench, http)}
        for query, status in (
            ("id=r-2&policy=least_load", 200),
            ("id=gone", 404),
            ("id=d-1&policy=nonsense", 400),
        ):
            async with http.get(f"{bench.url}/console/decision?{query}", headers=cookie) as response:
                assert response.status == status, query
                assert response.headers["cache-control"] == "no-store"
                if status == 200:
                    assert (await response.json())["decision_id"] == "d-2"
        assert "GetDecision least_load" in answers.asked


async def test_one_collector_for_all_viewers_and_none_without(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_LINGER_S", 0.0)
    monkeypatch.setattr(collecting, "LOOK_S", 0.05)
    async with served(tmp_path) as (bench, answers):
        state = bench.gateway.state
        assert state.console is not None
        viewers = state.console.viewers
        assert not answers.asked  # no page is open
        headers = bearer(bench)
        async with contextlib.AsyncExitStack() as pages:
            for _ in range(10):
                await pages.enter_async_context(
                    http.get(f"{bench.url}/console/live?topic=requests", headers=headers)
                )
            await until(lambda: len(viewers) == 10)
            await until(lambda: answers.asked.count("GetConductorStatus") >= 3)
            # Each look asks once, however many look.
            assert answers.asked.count("ListDecisions") <= 2 * answers.asked.count("GetConductorStatus") + 2
        await until(lambda: not len(viewers))
        await until(lambda: not viewers.wanted.is_set())
        assert not state.active_count

        async def quiet() -> bool:
            before = len(answers.asked)
            await state.clock.sleep(0.5)
            return len(answers.asked) == before

        await until(quiet)
        assert state.stats.aborted._value.get() == 0  # a page that is closed is no request that failed


async def test_a_gateway_that_ends_ends_its_streams(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with (
        served(tmp_path) as (bench, _),
        http.get(f"{bench.url}/console/live?topic=pool", headers=bearer(bench)) as response,
    ):
        await first_event(response)
        stopping = asyncio.create_task(bench.gateway.stop())
        async with asyncio.timeout(WAIT_S):
            await response.content.read()
        await stopping


async def test_slow_viewers_are_dropped_and_others_are_not() -> None:
    viewers = Viewers(viewers_max=2)
    slow, quick = viewers.enter(Topic.POOL), viewers.enter(Topic.POOL)
    with pytest.raises(Exception, match="2 pages"):
        viewers.enter(Topic.POOL)
    for number in range(EVENTS_MAX + 1):
        viewers.publish(dict.fromkeys(Topic, b"%d" % number))
        assert await quick.next() == b"%d" % number
    assert slow.dropped
    assert await slow.next() is None
    assert not quick.dropped
    assert len(viewers) == 1
    late = viewers.enter(Topic.POOL)
    assert await late.next() == b"%d" % EVENTS_MAX  # what was seen last, at once
    viewers.close()
    assert await quick.next() is None
    assert not viewers.wanted.is_set()


async def test_a_thousand_instances(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with served(tmp_path) as (bench, _):
        engine = bench.engines["e"]
        bench.conductor.set_instances([engine.instance(instance_id=f"e-{number}") for number in range(1000)])
        headers = bearer(bench)
        async with http.get(
            f"{bench.url}/console/live?topic=instances", headers=headers, read_bufsize=1 << 23
        ) as response:
            found = await first_event(response)
            while len(found["instances"]) < 1000:
                found = await first_event(response)
        async with http.get(f"{bench.url}/console/live?topic=overview", headers=headers) as response:
            assert (
                len(await response.content.readuntil(b"\n")) < 16_384
            )  # the overview does not grow with them
