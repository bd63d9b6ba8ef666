"""`mooncache cost` and the line about money of `mooncache why`, against a real conductor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.cli import app
from mooncache.prices import example
from mooncache.prices.core.hardware import CostSpec
from mooncache.prices.core.price_book import PriceBook
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import Conductor, chain, pair, serve

CACHE = pb.CacheReport(
    hit_tokens=1120,
    local_tokens=320,
    loaded_tokens=800,
    loaded_bytes=50_000_000,
    load_ms=10.0,
    outcome=pb.CACHE_OUTCOME_PARTIAL,
    loaded_from=[pb.LoadedFrom(store_node="n1", tier="dram", blocks=50)],
)
COMPUTED_S, GENERATED_S = 0.090, 0.400
ONE_A_SECOND = PriceBook(
    cost=CostSpec(currency="EUR", processor_price_per_hour=3600.0),
    dram=example.DRAM[2:3],
    nic=example.NIC[1:2],
)


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(app.run, [*arguments, "--timeout", "20s", "--master", "127.0.0.1:1"])


async def answer(c: Conductor, name: str, tenant: str, cached_tokens: int, *, offline: bool = False) -> str:
    """One request from its plan to its end: 90 ms of computing, 400 ms of generating; return its decision."""
    plan = await c.schedule(name, chain(name, 100), tenant=tenant, offline=offline)
    cache = CACHE if cached_tokens else pb.CacheReport(outcome=pb.CACHE_OUTCOME_MISS)
    begin_ms = 0.0 + (cache.load_ms if cached_tokens else 0.0)
    prefill = pb.LegReport(
        role=pb.LEG_ROLE_PREFILL,
        instance_id=plan.prefill.instance_id,
        sent_ms=1.0,
        ended_ms=1.0 + begin_ms + COMPUTED_S * 1e3,
        code="OK",
        cache=cache,
    )
    decode = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d", sent_ms=1.0)
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, prefill, elapsed_ms=prefill.ended_ms)
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_FIRST_TOKEN, decode, elapsed_ms=150.0)
    decode.ended_ms, decode.code = 150.0 + GENERATED_S * 1e3, "OK"
    decode.cache.waited_ms = 149.0
    ended: dict[str, Any] = {
        "code": "OK",
        "elapsed_ms": 550.0,
        "output_tokens": 9,
        "cached_tokens": cached_tokens,
    }
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, prefill, decode, **ended)
    return str(plan.decision_id)


async def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert await run("cost", "--json", *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    dram, nic = ONE_A_SECOND.dram[0], ONE_A_SECOND.nic[0]
    path.write_text(
        '[cost]\ncurrency = "EUR"\nprocessor_price_per_hour = 3600\n'
        f"[[dram]]\ngb = {dram.gb}\nprice_per_hour = {dram.price_per_hour}\n"
        f"[[nic]]\ngbps = {nic.gbps}\nprice_per_hour = {nic.price_per_hour}\n",
        encoding="utf-8",
    )
    return path


def test_cost(
    tmp_path: Path, prices: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))

    async def scenario(c: Conductor) -> None:
        monkeypatch.setenv("MOONCACHE_CLUSTER_CONDUCTOR_TARGET", c.service.grpc_target)
        await c.register(*pair())
        await answer(c, "warm", "a", 1120)
        await answer(c, "cold", "b", 0)
        running = await c.schedule("running", chain("x", 100), tenant="b")
        assert running.admitted

        found = await document(capsys, "--prices", str(prices))
        assert set(found["tenants"]) == {"a", "b"}
        warm, cold, total = found["tenants"]["a"], found["tenants"]["b"], found["total"]
        record = await c.record("warm")
        # An engine's second costs 1; the network 50 MB.
        assert warm["prefill"] == pytest.approx(COMPUTED_S, rel=0.01)
        assert warm["decode"] == pytest.approx(GENERATED_S / record["expected"]["decode_sequences"], rel=0.01)
        assert warm["network"] == pytest.approx(0.05 * (ONE_A_SECOND.network_gb or 0), rel=0.01)
        whole_s = record["expected"]["without_cache_ms"] / 1e3
        assert whole_s > 0
        assert warm["saved"] == pytest.approx(whole_s - warm["prefill"] - warm["network"])
        assert (warm["input_tokens"], warm["cached_tokens"]) == (485, 1120)
        assert cold["saved"] == 0
        assert total["total"] == pytest.approx(warm["total"] + cold["total"])
        assert total["requests"] == 2
        assert [line for line in found["notes"] if line.startswith("1 decisions")], found["notes"]
        assert [line for line in found["notes"] if line.startswith("the master did not say")]
        assert {line.split(":")[0] for line in found["holes"]} == {
            "no price for gpu_node",
            "no price for ssd",
        }
        assert not found["made_up_prices"]

        only = await document(capsys, "--prices", str(prices), "--tenant", "b")
        assert set(only["tenants"]) == {"b"}
        assert only["total"]["total"] == pytest.approx(cold["total"])

        assert await run("cost") == 0
        text = capsys.readouterr().out
        for part in ("MADE-UP EXAMPLE PRICES", "a million tokens", "caches saved", "assumed", "not seen"):
            assert part in text
        assert await run("why", "warm", "--prices", str(prices)) == 0
        assert "cost about" in (text := capsys.readouterr().out)
        assert "EUR: computing 0.09" in text
        assert "no price for ssd" in text
        assert await run("why", "running") == 0
        assert "cost about" not in capsys.readouterr().out
        assert await run("cost", "--window", "0s") == 2
        capsys.readouterr()

    serve(tmp_path, scenario)


def test_the_cost_of_both_classes(
    tmp_path: Path, prices: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))

    async def scenario(c: Conductor) -> None:
        monkeypatch.setenv("MOONCACHE_CLUSTER_CONDUCTOR_TARGET", c.service.grpc_target)
        await c.register(*pair())
        await answer(c, "chat", "a", 0)
        assert set((await document(capsys, "--prices", str(prices)))["classes"]) == {"online"}
        assert await run("cost", "--prices", str(prices)) == 0
        assert "online and offline" not in capsys.readouterr().out
        await answer(c, "batch", "a", 1120, offline=True)
        found = await document(capsys, "--prices", str(prices))
        assert set(found["tenants"]) == {"a"}
        online, offline = found["classes"]["online"], found["classes"]["offline"]
        assert (online["requests"], offline["requests"]) == (1, 1)
        assert (online["cached_tokens"], offline["cached_tokens"]) == (0, 1120)
        assert offline["per_million_tokens"] == pytest.approx(offline["total"] / (1605 + 9) * 1e6)
        assert online["total"] + offline["total"] == pytest.approx(found["total"]["total"])
        assert await run("cost", "--prices", str(prices)) == 0
        assert "online and offline, EUR" in capsys.readouterr().out
        assert await run("why", "batch", "--prices", str(prices)) == 0
        assert "EUR, offline: computing " in capsys.readouterr().out

    serve(tmp_path, scenario)


def test_records_are_listed_page_by_page(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        ids = [await answer(c, f"r{number}", "a", 0) for number in range(5)]
        seen: list[str] = []
        while True:
            asked = pb.ListDecisionsRequest(before=seen[-1] if seen else "", count=2)
            page = await c.call("ListDecisions", asked)
            if not page.records_json:
                break
            assert len(page.records_json) <= 2
            seen += [json.loads(text)["decision_id"] for text in page.records_json]
        assert seen == ids[::-1]
        assert page.kept_max == 10_000
        page = await c.call("ListDecisions", pb.ListDecisionsRequest(before="nobody"))
        assert not page.records_json
        whole, brief = (
            await c.record("r4"),
            json.loads((await c.call("ListDecisions", pb.ListDecisionsRequest())).records_json[0]),
        )
        assert brief == {name: value for name, value in whole.items() if name in brief}
        assert set(whole) - set(brief) == {
            "candidate_count",
            "prefill_candidates",
            "inline_candidates",
            "decode_candidates",
            "misses",
        }

    serve(tmp_path, scenario)
