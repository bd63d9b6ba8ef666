"""A thousand instances report to one conductor over gRPC: its processor time, and how long decisions take meanwhile.

The conductor and the instances are processes of their own; decisions are asked for and timed in this one. An instance
reports another load and some blocks that came and went whenever the conductor's last answer asked for it, as a worker
does.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

from mooncache.bench.worker import processor_s
from mooncache.conductor.service import ConductorService
from mooncache.config import Config, load
from mooncache.errors import ConductorUnavailable, Internal, MooncacheError
from mooncache.master.service import MasterService
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.reporting.rows import Row, bar_row
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE
from mooncache.runtime.service import Service

INSTANCES = 1000
BAR_CORES = 0.33
BAR_P99_MS = 5.0
_SCHEDULES_PER_S = 20.0
_CHANNELS = 50  # each worker has one of its own; in one process that many stand for them
_KEYS = 512  # of a prompt of 8,192 tokens
_CHANGED_KEYS = 32  # of a report
_START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 10.0
_SPAWN = multiprocessing.get_context("spawn")


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Measure for half a minute, some seconds when `quick`."""
    seconds = 8.0 if quick else 30.0
    with TemporaryDirectory() as folder, ExitStack() as processes:
        settings = {
            "cluster.state_dir": folder,
            "logging.level": "error",
            "master.port": 0,
            "conductor.port": 0,
        }
        _, master = _process(processes, _serve, MasterService, load(env={}, overrides=settings))
        targets = {"cluster.master_targets": str(_received(master)[0])}
        config = load(env={}, overrides={**settings, **targets})
        conductor, answers = _process(processes, _serve, ConductorService, config)
        target, token = (str(text) for text in _received(answers))
        progress(f"{INSTANCES} instances register")
        _, fleet = _process(processes, _fleet, target, token)
        _received(fleet)
        progress(f"decisions for {seconds:.0f} s")
        fleet.send("count")
        before = _received(fleet)[0]
        began_s, busy_s = time.perf_counter(), processor_s(conductor)
        times = sorted(asyncio.run(_decide(target, token, seconds)))
        took_s, busy_s = time.perf_counter() - began_s, processor_s(conductor) - busy_s
        fleet.send("count")
        reports, failed, problem = _received(fleet)
    if failed:
        raise Internal(f"{failed} reports failed, for example: {problem}")
    label = f"{INSTANCES} instances report to one conductor"
    return [
        bar_row(f"{label}: its processor time", busy_s / took_s, "cores", at_most=BAR_CORES),
        bar_row(
            f"{label}: Schedule p99 meanwhile",
            times[int(0.99 * (len(times) - 1))] * 1e3,
            "ms",
            at_most=BAR_P99_MS,
        ),
        bar_row(f"{label}: Schedule p50 meanwhile", times[len(times) // 2] * 1e3, "ms"),
        bar_row(f"{label}: reports", (reports - before) / took_s, "1/s"),
    ]


def _process(processes: ExitStack, target: Callable[..., None], *args: object) -> tuple[int, Connection]:
    """Start a process that ends with the stack; return its id and the pipe over which it answers."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    processes.callback(process.join)
    processes.callback(process.terminate)
    assert process.pid is not None, "it was started"
    return process.pid, ours


def _received(pipe: Connection) -> tuple[Any, ...]:
    """The next answer of a process. Raises Internal when it does not come."""
    with suppress(EOFError):
        if pipe.poll(_START_TIMEOUT_S):
            found: tuple[Any, ...] = pipe.recv()
            return found
    raise Internal("a process of the benchmark has ended or does not answer")


def _serve(kind: Callable[[Config], Service], config: Config, pipe: Connection) -> None:
    async def serve() -> None:
        service = kind(config)
        await service.start()
        pipe.send((service.grpc_target, service.token.text))
        await asyncio.get_running_loop().create_future()

    asyncio.run(serve())


def _channel(target: str, token: str) -> GrpcChannel:
    return GrpcChannel(target, CONDUCTOR_SERVICE, token=token, unavailable_error=ConductorUnavailable)


async def _decide(target: str, token: str, seconds: float) -> list[float]:
    """Ask for decisions at a steady pace, end each request a second later; return how long the decisions took."""
    rng, times = random.Random(2), []
    async with asyncio.timeout(seconds + _START_TIMEOUT_S):
        channel = _channel(target, token)
        ended: list[asyncio.Task[object]] = []

        async def end(decision_id: str) -> None:
            await asyncio.sleep(1.0)
            report = pb.ReportProgressRequest(
                decision_id=decision_id, phase=pb.REQUEST_PHASE_FINISHED, output_tokens=20
            )
            await channel.call("ReportProgress", report, pb.ReportProgressResponse, _CALL_TIMEOUT_S)

        began_s = time.perf_counter()
        for number in itertools.count():
            due_s = began_s + number / _SCHEDULES_PER_S
            if due_s > began_s + seconds:
                break
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            request = pb.ScheduleRequest(
                request_id=f"r{number}",
                tenant="t",
                model="bench",
                prompt_tokens=_KEYS * 16 + 7,
                keys=rng.randbytes(_KEYS * 32),
            )
            asked_s = time.perf_counter()
            plan = await channel.call("Schedule", request, pb.ScheduleResponse, _CALL_TIMEOUT_S)
            if number >= _SCHEDULES_PER_S:  # the first second opens connections and fills caches
                times.append(time.perf_counter() - asked_s)
            ended.append(asyncio.ensure_future(end(plan.decision_id)))
        await asyncio.gather(*ended)
        await channel.close()
    return times


def _fleet(target: str, token: str, pipe: Connection) -> None:
    asyncio.run(_report_all(target, token, pipe))


async def _report_all(target: str, token: str, pipe: Connection) -> None:
    channels = [_channel(target, token) for _ in range(_CHANNELS)]
    counted = {"reports": 0, "failed": 0}
    problems: list[str] = []

    async def instance(number: int) -> None:
        name, rng, channel = f"i{number}", random.Random(number), channels[number % _CHANNELS]
        kept = rng.randbytes(_CHANGED_KEYS * 32)
        for sequence in itertools.count(1):
            came = rng.randbytes(_CHANGED_KEYS * 32)
            request = pb.ReportInstanceRequest(
                instance_id=name,
                incarnation=1,
                state=pb.INSTANCE_STATE_READY,
                load=pb.InstanceLoad(running=rng.randrange(8), kv_usage=rng.random(), tbt_ms=30.0),
                changes=pb.CacheChanges(sequence=sequence, stored=came, removed=kept, full=sequence == 1),
            )
            kept = came
            try:
                if sequence == 1:
                    await channel.call(
                        "RegisterInstance", registration(number), pb.RegisterInstanceResponse, _CALL_TIMEOUT_S
                    )
                answer = await channel.call(
                    "ReportInstance", request, pb.ReportInstanceResponse, _CALL_TIMEOUT_S
                )
            except MooncacheError as error:
                counted["failed"] += 1
                problems.append(error.message)
                return
            counted["reports"] += 1
            await asyncio.sleep(answer.report_interval_ms / 1e3)

    def registration(number: int) -> pb.RegisterInstanceRequest:
        role = pb.INSTANCE_ROLE_PREFILL if number % 4 else pb.INSTANCE_ROLE_DECODE
        described = pb.Instance(
            instance_id=f"i{number}",
            incarnation=1,
            role=role,
            state=pb.INSTANCE_STATE_READY,
            engine="bench",
            url=f"http://127.0.0.1:1/i{number}",
            model="bench",
            max_model_tokens=100_000,
            kv_capacity_tokens=1_000_000,
            block_tokens=16,
            kv_bytes_per_token=131_072,
            max_sequences=64,
            pool=True,
        )
        return pb.RegisterInstanceRequest(instance=described, worker_run=number + 1)

    running = [asyncio.ensure_future(instance(number)) for number in range(INSTANCES)]
    async with asyncio.timeout(_START_TIMEOUT_S):
        while counted["reports"] < len(running) and not counted["failed"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    pipe.send((len(running),))
    while True:
        if await asyncio.to_thread(pipe.poll, 1.0):
            pipe.recv()
            pipe.send((counted["reports"], counted["failed"], problems[0] if problems else ""))
