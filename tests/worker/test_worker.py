"""A worker whose engine is a process that misbehaves on request (fake_engine.py), and a recording conductor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.auth import tenant_token
from mooncache.client.keys import split_keys
from mooncache.config import Config
from mooncache.errors import ConfigInvalid, EngineFailed, PermissionDenied
from mooncache.kvcache.keys import passport_from_json, passport_to_json, request_keys
from mooncache.kvcache.leg_hint import CacheReport
from mooncache.kvcache.leg_reports import QUEUE_MAX, EndedLeg, LegReporter, encode
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.proto.v1 import worker_pb2
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import WORKER_SERVICE
from mooncache.worker.background import run_engine, take_leg_reports
from mooncache.worker.service import WorkerService, attach_url
from mooncache.worker.state import WorkerCounter
from tests.conditions import WAIT_S, until
from tests.rpcs import health_of
from tests.worker.support import PASSPORT, QUICK_RESTARTS, Conductor, alive, conductor, order, settings
from tests.worker.test_kv_events import BLOCK, pack, stored

READY, STARTING, DRAINING, SUSPECT = (
    pb.INSTANCE_STATE_READY,
    pb.INSTANCE_STATE_STARTING,
    pb.INSTANCE_STATE_DRAINING,
    pb.INSTANCE_STATE_SUSPECT,
)


@contextlib.asynccontextmanager
async def worker(config: Config) -> AsyncIterator[WorkerService]:
    service = WorkerService(config, QUICK_RESTARTS)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


@contextlib.asynccontextmanager
async def both(folder: Path, **changes: Any) -> AsyncIterator[tuple[WorkerService, Conductor]]:
    async with (
        conductor(settings(folder)) as found,
        worker(settings(folder, found.port, **changes)) as service,
    ):
        yield service, found


def ready(found: Conductor) -> bool:
    return found.state() == READY


async def test_an_engine_is_started_registered_and_ended(tmp_path: Path) -> None:
    order(settings(tmp_path), metrics='fake_running 2\nfake_waiting{model="m"} 3\n')
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found) and found.reports[-1].load.running == 2, "ready with its load")
        instance = found.instances["fake-1"]
        assert found.registrations[0].state == STARTING
        assert passport_from_json(instance.passport_json) == PASSPORT
        assert (instance.model, instance.engine, instance.engine_version) == ("fake-model", "fake", "9.9")
        assert (instance.max_model_tokens, instance.block_tokens, instance.pool) == (4096, BLOCK, True)
        assert instance.role == pb.INSTANCE_ROLE_BOTH
        assert found.reports[-1].load.waiting == 3
        assert service.readiness() == ""
        pid = await engine_pid(service)
        assert alive(pid)
        order(settings(tmp_path))
    assert not alive(pid)
    assert found.state() == DRAINING


async def engine_pid(service: WorkerService) -> int:
    return int((await status(service)).engine_pid)


async def status(service: WorkerService) -> worker_pb2.GetWorkerStatusResponse:
    channel = GrpcChannel(service.grpc_target, WORKER_SERVICE, token=service.token.text)
    try:
        answer: worker_pb2.GetWorkerStatusResponse = await channel.call(
            "GetWorkerStatus", worker_pb2.GetWorkerStatusRequest(), worker_pb2.GetWorkerStatusResponse, 10
        )
        return answer
    finally:
        await channel.close()


async def test_status_is_for_the_cluster_token_alone(tmp_path: Path) -> None:
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        answer = await status(service)
        assert (answer.doing, answer.engine_starts, answer.instance.state) == ("ready", 1, READY)
        token = tenant_token(service.token, "somebody")
        channel = GrpcChannel(service.grpc_target, WORKER_SERVICE, token=token.text)
        with pytest.raises(PermissionDenied):
            await channel.call(
                "GetWorkerStatus", worker_pb2.GetWorkerStatusRequest(), worker_pb2.GetWorkerStatusResponse, 10
            )
        await channel.close()


async def test_a_passport_that_changes_is_told_at_once_in_the_same_run(tmp_path: Path) -> None:
    """Weights were changed in the running engine: conductor and gateways must not look for its former keys."""
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        first = found.instances["fake-1"]
        other = dataclasses.replace(PASSPORT, weights_digest="others")
        path = service.state.run_dir / "passport.json"
        content = json.loads(path.read_text()) | {"passport": json.loads(passport_to_json(other))}
        partial = path.with_name("partial")
        partial.write_text(json.dumps(content))
        partial.replace(path)
        await until(
            lambda: passport_from_json(found.instances["fake-1"].passport_json) == other, "the new passport"
        )
        second = found.instances["fake-1"]
        assert (second.incarnation, second.pool) == (first.incarnation, first.pool)
        assert service.state.cache is not None
        assert service.state.cache.passport == other
        path.write_text("no passport")
        count = len(found.reports)
        await until(lambda: len(found.reports) > count + 10, "more reports")
        assert passport_from_json(found.instances["fake-1"].passport_json) == other


async def test_a_crash_leads_to_a_new_run_with_a_new_incarnation(tmp_path: Path) -> None:
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        first = found.instances["fake-1"].incarnation
        process = service.state.process
        assert process is not None
        await process.kill()
        await until(lambda: ready(found) and found.instances["fake-1"].incarnation != first, "ready again")
        answer = await status(service)
        assert answer.engine_starts == 2
        assert any("restarting" in report.reason for report in found.reports)


async def test_an_engine_that_always_ends_is_given_up(tmp_path: Path) -> None:
    order(settings(tmp_path), exit=3)
    async with conductor(settings(tmp_path)) as found:
        service = WorkerService(
            settings(tmp_path, found.port), dataclasses.replace(QUICK_RESTARTS, restart_count_max=2)
        )
        with pytest.raises(EngineFailed, match=r"given up after 3 failures.*exit code 3"):
            await service.run()
    log = (tmp_path / "logs" / "fake-1.engine.log").read_text()
    assert log.count("told to end") == 3


async def test_a_hanging_engine_is_killed_and_started_again(tmp_path: Path) -> None:
    async with both(tmp_path, worker__hang_timeout_s=0.5) as (service, found):
        await until(lambda: ready(found), "ready")
        first, pid = found.instances["fake-1"].incarnation, await engine_pid(service)
        order(settings(tmp_path), health="hang")
        await until(lambda: not alive(pid), "killed")
        order(settings(tmp_path))
        await until(lambda: ready(found) and found.instances["fake-1"].incarnation != first, "ready again")


async def test_an_engine_that_answers_and_does_not_work_is_killed(tmp_path: Path) -> None:
    async with both(tmp_path, worker__hang_timeout_s=1.0) as (_, found):
        await until(lambda: ready(found), "ready")
        first = found.instances["fake-1"].incarnation
        order(settings(tmp_path), metrics="fake_running 1\n")
        await until(lambda: found.instances["fake-1"].incarnation != first, "started again")
        assert any("nothing moved" in report.reason for report in found.reports)
        order(settings(tmp_path))
        await until(lambda: ready(found), "ready again")


async def test_an_engine_that_answers_503_is_suspect_and_forgiven(tmp_path: Path) -> None:
    async with both(tmp_path) as (_, found):
        await until(lambda: ready(found), "ready")
        order(settings(tmp_path), health=503)
        await until(lambda: found.state() == SUSPECT, "suspect")
        assert "no answer" in found.reports[-1].reason
        order(settings(tmp_path))
        await until(lambda: ready(found), "ready again")
        assert len({instance.incarnation for instance in found.registrations}) == 1


async def test_an_engine_that_is_never_healthy_is_started_again(tmp_path: Path) -> None:
    order(settings(tmp_path), health=503)
    async with both(tmp_path, worker__start_timeout_s=0.5) as (service, found):
        await until(lambda: service.state.supervision.starts >= 2, "second start")
        order(settings(tmp_path))
        await until(lambda: ready(found), "ready")


async def test_role_switch_and_drain_follow_the_conductor(tmp_path: Path) -> None:
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        found.roles["fake-1"] = pb.INSTANCE_ROLE_PREFILL
        await until(lambda: service.state.role == "prefill", "prefill")
        found.drain = True
        await until(lambda: found.state() == DRAINING and found.reports[-1].reason == "drained", "drained")
        assert service.readiness() == "drained"
        found.drain = False
        await until(lambda: ready(found), "ready again")


async def test_health_follows_the_engine_and_the_conductor(tmp_path: Path) -> None:
    async with both(tmp_path) as (service, found):
        found.lease_ms = 500
        found.instances.clear()  # it registers again
        await until(lambda: service.state.lease_s == 0.5, "the shorter lease")
        target, name = service.grpc_target, WORKER_SERVICE.full_name

        async def says(status: str) -> bool:
            return await health_of(target, name) == status

        await until(lambda: says("SERVING"), "ready and registered")
        found.silent = True
        await until(lambda: says("NOT_SERVING"), "the conductor has forgotten it")
        assert await health_of(target) == "SERVING", "its engine takes requests"
        found.silent = False
        await until(lambda: says("SERVING"), "registered again")
        found.drain = True
        await until(lambda: says("NOT_SERVING"), "draining")
        assert await health_of(target, "liveness") == "SERVING"


async def test_the_end_waits_for_requests_under_way(tmp_path: Path) -> None:
    order(settings(tmp_path), metrics="fake_running 1\n")
    async with conductor(settings(tmp_path)) as found:
        service = WorkerService(settings(tmp_path, found.port))
        await service.start()
        await until(lambda: service.state.load.running == 1 and ready(found), "busy")
        pid = await engine_pid(service)
        end = asyncio.create_task(service.stop())
        await until(lambda: found.state() == DRAINING and len(found.reports) > 20, "draining")
        assert alive(pid)
        assert not end.done()
        order(settings(tmp_path), metrics="fake_running 0\n")
        await end
        assert not alive(pid)


async def test_the_engine_goes_on_without_a_conductor(tmp_path: Path) -> None:
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        pid = await engine_pid(service)
        found.silent = True
        count = len(found.reports)
        await until(lambda: service.state.counters.get("conductor_call_failures", 0) >= 2, "failed calls")
        assert alive(pid)
        assert service.readiness() == ""
        found.silent = False
        found.instances.clear()  # it was restarted and knows nobody
        await until(lambda: len(found.reports) > count and ready(found), "reported again")
        assert await engine_pid(service) == pid


async def test_cache_events_reach_the_conductor(tmp_path: Path) -> None:
    tokens = list(range(8 * BLOCK))
    config = settings(tmp_path)
    batches = [
        pack(stored([1, 2, 3], tokens[: 3 * BLOCK], extra=[["salt"], None, None])).hex(),
        pack(stored([4], tokens[3 * BLOCK : 4 * BLOCK], parent=3)).hex(),
        pack(["BlockRemoved", [4], "GPU"]).hex(),
        b"garbage".hex(),
        pack(stored([5], tokens[4 * BLOCK : 5 * BLOCK], parent=4)).hex(),
    ]
    keys = split_keys(request_keys(PASSPORT, tokens, salt="salt"))
    order(config, batches=batches[:2])
    async with both(tmp_path) as (service, found):
        await until(
            lambda: found.held.get("fake-1") == set(keys[:4]), "what was stored before anybody listened"
        )
        order(config, batches=batches)
        await until(lambda: found.held["fake-1"] == {*keys[:3], keys[4]}, "what came live")
        found.held["fake-1"].clear()
        found.want_full = True
        await until(lambda: found.held["fake-1"] == {*keys[:3], keys[4]}, "the full report")
        answer = await status(service)
        assert answer.events_seen == 5
        assert answer.events_lost == 0
        assert service.state.invalid_events == 1
        found.instances.clear()
        await until(
            lambda: found.held["fake-1"] == {*keys[:3], keys[4]}, "told again to a conductor that forgot"
        )
        page = service.metrics.render().decode()
        assert "mooncache_worker_event_batches_seen_total 5.0" in page
        assert "mooncache_worker_cached_blocks 4.0" in page


async def test_swallowed_events_come_by_replay_or_are_counted(tmp_path: Path) -> None:
    tokens = list(range(8 * BLOCK))
    config = settings(tmp_path)
    batches = [
        pack(stored([n + 1], tokens[n * BLOCK : (n + 1) * BLOCK], parent=n or None)).hex() for n in range(8)
    ]
    keys = split_keys(request_keys(PASSPORT, tokens))
    order(config, batches=batches[:1])
    async with both(tmp_path) as (service, found):
        await until(lambda: found.held.get("fake-1") == set(keys[:1]), "first")
        order(config, batches=batches[:4], swallow=[1, 2])
        await until(lambda: found.held["fake-1"] == set(keys[:4]), "replayed")
        assert service.state.stream.lost == 0
        order(config, batches=batches, swallow=[4, 5, 6], oldest=6)
        await until(lambda: service.state.stream.lost == 2, "lost")
        await until(lambda: service.state.stream.seen == 6, "the rest was taken in")
        assert found.held["fake-1"] == set(keys[:4])
        assert service.state.cache is not None
        assert service.state.cache.unknown_parent_count == 2


async def test_a_flood_of_events_does_not_stop_health_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_engine, "_PENDING_EVENTS_MAX", 100)
    # A busy machine may answer late; a worker that takes in events alone would not ask within this time either.
    monkeypatch.setattr(run_engine, "_HEALTH_TIMEOUT_S", 30.0)
    config = settings(tmp_path)
    batch = pack(*[stored([n], list(range(n, n + BLOCK))) for n in range(500)]).hex()
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        before = len(found.reports)
        stream, taken_in = service.state.stream, set()

        async def run_beside() -> None:
            while stream.seen < 40:
                taken_in.add(stream.seen)
                await asyncio.sleep(0)

        order(config, batches=[batch] * 40)
        await asyncio.wait_for(run_beside(), WAIT_S)
        assert len(taken_in) > 20, "other tasks of the worker have their turn between two batches"
        await until(lambda: len(found.held["fake-1"]) == 500, "all told")
        assert {report.state for report in found.reports[before:]} == {READY}


async def test_attaching_to_a_running_engine(tmp_path: Path) -> None:
    """The second worker starts nothing; it finds out what the first one's engine is."""
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        pid = await engine_pid(service)
        changes = {
            "worker__attach_url": service.state.url + "/",
            "worker__instance_id": "attached",
            "worker__model": "",
            "worker__model_name": "",
            "worker__attach_passport": str(service.state.run_dir / "passport.json"),
        }
        async with worker(settings(tmp_path, found.port, **changes)) as second:
            await until(lambda: "attached" in found.instances and second.readiness() == "", "attached")
            instance = second.state.instance()
            assert instance.model == "fake-model"
            assert passport_from_json(instance.passport_json) == PASSPORT
            assert (await status(second)).engine_pid == 0
            order(settings(tmp_path), exit=1)
            await service.state.process.kill()  # type: ignore[union-attr]
            before = instance.incarnation
            await until(lambda: second.readiness() != "", "lost")
            order(settings(tmp_path))
            await until(
                lambda: second.state.incarnation != before and second.readiness() == "", "found the next run"
            )
            pid = await engine_pid(service)
        assert alive(pid), "an engine that somebody else started is left alone"


async def test_two_workers_of_one_name_are_refused(tmp_path: Path) -> None:
    async with both(tmp_path) as (_, found):
        second = WorkerService(settings(tmp_path, found.port))
        with pytest.raises(ConfigInvalid, match="is already running"):
            await second.start()


@pytest.mark.parametrize(
    "engine", ["nowhere:Adapter", "json:JSONDecoder", "mooncache.worker.adapters.hf:Missing"]
)
async def test_an_adapter_that_cannot_be_loaded_is_named(tmp_path: Path, engine: str) -> None:
    with pytest.raises(ConfigInvalid, match=engine.partition(":")[0]):
        await WorkerService(settings(tmp_path, worker__engine=engine)).start()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h:1", "http://h", "http://h:99999", "http://"])
def test_attach_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigInvalid, match="attach_url"):
        attach_url(url)


def test_attach_url_is_cut_to_the_server() -> None:
    assert attach_url("http://127.0.0.1:8000/v1/") == "http://127.0.0.1:8000"


async def test_ended_legs_reach_the_conductor_once_it_is_back(tmp_path: Path) -> None:
    """The engine's end of the socket is the connector's own; the engine may be there before the worker."""
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        found.silent = True
        reporter = LegReporter(run_engine.passport_path(service.state))
        legs = [EndedLeg(f"d-{at}", CacheReport(hit_tokens=16 * at, load_ms=1.5)) for at in range(3)]
        try:
            assert all(reporter.send(leg) for leg in legs)
            await until(lambda: len(service.state.ended_legs) == 3, "taken from the engine")
            found.silent = False
            await until(lambda: not service.state.ended_legs, "reported")
            said = [leg for report in found.reports for leg in report.ended_legs]
            assert [(leg.decision_id, leg.cache.hit_tokens, leg.cache.load_ms) for leg in said] == [
                (leg.decision_id, leg.cache.hit_tokens, 1.5) for leg in legs
            ]
            assert not said[0].cache.HasField("held_tokens"), "it was not said"
        finally:
            reporter.close()


async def test_hostile_reports_of_legs_are_counted_and_left_out(tmp_path: Path) -> None:
    async with both(tmp_path) as (service, found):
        await until(lambda: ready(found), "ready")
        state = service.state
        good = encode(EndedLeg("d-1", CacheReport()))
        for frames in ([b""], [b"\xff{"], [b"[]"], [good, good], [good[:-1]], [b'{"decision_id": "d"}']):
            take_leg_reports.take(state, frames)
        take_leg_reports.take(state, [good.replace(b"d-1", b"d" * 65)])
        assert state.counters[WorkerCounter.LEG_REPORTS_INVALID] == 7
        assert not state.ended_legs
        state.registered = False  # no report takes them away meanwhile
        for _ in range(take_leg_reports.LEGS_MAX + 2):
            take_leg_reports.take(state, [good])
        assert len(state.ended_legs) == take_leg_reports.LEGS_MAX
        assert state.counters[WorkerCounter.ENDED_LEGS_LOST] == 2
        socket = run_engine.passport_path(state).with_suffix(".legs")
        assert socket.stat().st_mode & 0o077 == 0, "no other user may write there"


def test_an_engine_goes_on_when_nothing_takes_its_reports(tmp_path: Path) -> None:
    leg = EndedLeg("d-1", CacheReport())
    assert LegReporter(None).send(leg), "no worker is beside it"
    for path in (tmp_path / "passport.json", tmp_path / ("x" * 200) / "passport.json"):
        reporter = LegReporter(path)
        try:
            kept = [reporter.send(leg) for _ in range(2 * QUEUE_MAX)]
            assert kept.count(True) <= QUEUE_MAX + 1, "so many wait for a worker that may come"
            assert not kept[-1]
        finally:
            reporter.close()
