"""`mooncache why` against a real conductor: the sentence, the tables, the time line, --json, an id nobody knows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mooncache.cli import app
from mooncache.cli.why import _handover, timeline
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.reporting.output import console
from tests.conductor.support import Conductor, chain, config_at, instance, pair, running
from tests.conductor.support import serve as run_conductor

LOADED = pb.CacheReport(hit_tokens=1600, loaded_tokens=1600, load_ms=12.5, outcome=pb.CACHE_OUTCOME_HIT)


LEGS = (
    "first token",
    "between tokens",
    "waiting before the prefill",
    "prefill",
    "hand-over to decode",
    "generating",
)


def check_legs(text: str) -> None:
    """Each leg has what was expected of it and what was observed."""
    rows = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    for what in LEGS:
        numbers = rows[what].split()[len(what.split()) :]
        assert len(numbers) >= 2, rows[what]
        assert all(number.replace(",", "").replace(".", "").isdigit() for number in numbers), rows[what]


async def ask(c: Conductor, *arguments: str) -> int:
    return await asyncio.to_thread(app.run, ["why", *arguments])


async def ask_for_another_policy(c: Conductor, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(c, "req-1", "--policy", "algorithm1") == 0
    text = capsys.readouterr().out
    assert "policy algorithm1" in text
    assert "computes 1605 of 1605 prompt tokens, d1 generates." in text
    assert "first token expected after" in text
    assert await ask(c, "req-1", "--policy", "nonsense") == 2
    assert "there is no policy 'nonsense'; there are mooncache" in capsys.readouterr().err


async def serve(c: Conductor, plan: pb.ScheduleResponse) -> None:
    leg = pb.LegReport(
        role=pb.LEG_ROLE_PREFILL,
        instance_id=plan.prefill.instance_id,
        sent_ms=3.0,
        ended_ms=80.0,
        code="OK",
        cache=LOADED,
    )
    decode = pb.LegReport(role=pb.LEG_ROLE_DECODE, instance_id="d1", sent_ms=3.0)
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_PREFILLED, leg, elapsed_ms=80.0)
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_FIRST_TOKEN, decode, elapsed_ms=99.0)
    decode.ended_ms, decode.code = 150.0, "OK"
    phase, ended = pb.REQUEST_PHASE_FINISHED, {"code": "OK", "elapsed_ms": 150.0, "output_tokens": 9}
    await c.progress(plan.decision_id, phase, leg, decode, **ended)


def test_why(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    async def scenario() -> None:
        config = config_at(tmp_path, **{"conductor.suspect_after_s": 60, "conductor.lease_s": 120})
        async with running(config) as c:
            monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))
            monkeypatch.setenv("MOONCACHE_CLUSTER_CONDUCTOR_TARGET", c.service.grpc_target)
            roles = {
                "p1": pb.INSTANCE_ROLE_PREFILL,
                "p2": pb.INSTANCE_ROLE_PREFILL,
                "d1": pb.INSTANCE_ROLE_DECODE,
            }
            await c.register(*[instance(name, role) for name, role in roles.items()])
            assert await ask(c) == 1
            assert "No request has been scheduled here yet." in capsys.readouterr().err
            plan = await c.schedule("req-1", chain("a", 100))
            prefill = plan.prefill.instance_id
            await serve(c, plan)

            assert await ask(c) == 0, "without a name the last request is explained"
            text = capsys.readouterr().out
            check_legs(text)
            for part in (
                "request req-1",
                f"{prefill} computes 1605 of 1605 prompt tokens, d1 generates.",
                f"-> {prefill}",
                "-> d1",
                "never seen",
                "no complete block",
                "gateway received the request",
                "scheduled",
                f"prefill leg to {prefill} sent",
                "1600 loaded in 12.5 ms",
                "first token",
                "decode leg to d1 ended OK",
                "finished",
            ):
                assert part in text, (part, text)

            assert await ask(c, plan.decision_id, "--json") == 0
            record = json.loads(capsys.readouterr().out)
            assert record["request_id"] == "req-1"
            moments = timeline(record)
            assert [at_ms for at_ms, _ in moments] == sorted(at_ms for at_ms, _ in moments)
            assert moments[0] == (0.0, "gateway received the request")

            await ask_for_another_policy(c, capsys)
            refused = await c.schedule("req-2", b"", model="other")
            assert await ask(c, refused.decision_id) == 0
            assert "No instance serves 'other'." in capsys.readouterr().out
            assert await ask(c, "nobody") == 1
            assert "DECISION_UNKNOWN" in capsys.readouterr().err

    asyncio.run(scenario())


@pytest.mark.parametrize("columns", [80, 120])
def test_both_legs_are_bars_on_one_line_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(console, "width", columns)

    async def scenario(c: Conductor) -> None:
        monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))
        monkeypatch.setenv("MOONCACHE_CLUSTER_CONDUCTOR_TARGET", c.service.grpc_target)
        await c.register(*pair())
        await serve(c, await c.schedule("req-1", chain("a", 100)))
        assert await ask(c, "req-1") == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        rows = lines[lines.index("one line of time") + 1 :]
        rows = rows[: rows.index("")]
        assert max(map(len, rows)) == columns
        assert [row.split()[:2] for row in rows[1:]] == [
            ["gateway", "plan"],
            ["prefill", "p"],  # load
            ["compute", rows[3].split()[1]],
            ["decode", "d1"],  # unknown: no cache report
            ["generate", rows[5].split()[1]],
        ]
        assert any("more was loaded" in line for line in lines)
        assert await ask(c, "req-1", "--json") == 0
        parts = [(span["leg"], span["part"]) for span in json.loads(capsys.readouterr().out)["spans"]]
        assert parts == [
            ("gateway", "plan"),
            ("prefill", "load"),
            ("prefill", "compute"),
            ("decode", "unknown"),
            ("decode", "generate"),
        ]

    run_conductor(tmp_path, scenario)


def test_why_says_what_was_given_up_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    given_up = [{"from_block": 10, "to_block": 100, "reason": "failed"}]
    _handover({"chosen": {"store_node": "node-7"}, "observed": {"given_up": given_up}})
    text = capsys.readouterr().out
    assert "blocks are handed over through node-7" in text
    assert "90 blocks were given up" in text and "the prefill leg failed" in text
    _handover({"chosen": None, "observed": {}})
    assert capsys.readouterr().out == ""


def test_why_without_a_conductor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config_at(tmp_path)
    (tmp_path / "cluster.token").write_text("mcc1." + "0" * 64)
    (tmp_path / "cluster.token").chmod(0o600)
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MOONCACHE_CLUSTER_CONDUCTOR_TARGET", "127.0.0.1:1")
    code = app.run(["why", "x", "--timeout", "1s"])
    error = capsys.readouterr().err
    assert "CONDUCTOR_UNAVAILABLE" in error or "DEADLINE_EXCEEDED" in error
    assert code != 0


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("computed_faster", "computing was faster than loading"),
        ("load_cut", "the load was slow and was cut"),
        ("hit", "hit"),
    ],
)
def test_the_time_line_says_in_words_why_a_hit_was_computed(outcome: str, words: str) -> None:
    cache = {"outcome": outcome, "local_tokens": 0, "loaded_tokens": 32, "load_ms": 4.0, "waited_ms": 0.0}
    leg = {"leg": "decode", "instance": "d1", "sent_ms": 1.0, "ended_ms": 9.0, "code": "OK", "cache": cache}
    event = {"phase": "finished", "elapsed_ms": 9.0, "since_decision_ms": 8.0, "legs": [leg]}
    said = [what for _, what in timeline({"events": [event]}) if what.startswith("decode leg to d1 ended")]
    assert said == [f"decode leg to d1 ended OK ({words}: 0 own, 32 loaded in 4.0 ms, waited 0.0 ms)"]
    leg["cache"] = {**cache, "reason": "cut after 1 of 9 blocks: the next did not come in 9 ms"}
    said = [what for _, what in timeline({"events": [event]}) if what.startswith("decode leg to d1 ended")]
    assert said[0].endswith("waited 0.0 ms; cut after 1 of 9 blocks: the next did not come in 9 ms)")
