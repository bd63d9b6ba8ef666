"""The service base over real gRPC and HTTP ports on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from mooncache import auth, errors
from mooncache.config import Config, load
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime.proof import METADATA_KEY, STALE, Prover, digest
from tests.conditions import until
from tests.runtime.service.support import TestService, channel, http


@pytest.fixture
async def service(config: Config) -> AsyncIterator[TestService]:
    made = TestService(config)
    await made.start()
    yield made
    await made.stop()


async def test_identity_comes_from_the_token(service: TestService) -> None:
    tenant = auth.tenant_token(service.token, "team-a")
    for token, expected in ((service.token, ("default", True)), (tenant, ("team-a", False))):
        link = channel(service, token)
        answer = await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
        assert (answer.master_id, answer.leading) == expected
        await link.close()
    contexts = service.state["contexts"]
    assert 0 < contexts[0].timeout_s <= 5.1  # gRPC rounds what is left up
    assert contexts[0].request_id != contexts[1].request_id


@pytest.mark.parametrize("token", ["", "x", "mcc1." + "0" * 64, "mct1.team-a." + "0" * 64])
async def test_wrong_tokens_are_refused(service: TestService, token: str) -> None:
    link = channel(service, token)
    with pytest.raises(errors.Unauthenticated):
        await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
    await link.close()
    assert "contexts" not in service.state


async def test_codes_travel(service: TestService) -> None:
    link = channel(service)
    with pytest.raises(errors.StaleIncarnation, match="ümlaut"):
        await link.call("GetTask", pb.GetTaskRequest(task_id="stale"), pb.GetTaskResponse, 5.0)
    with pytest.raises(errors.NotLeader, match="ask"):
        await link.call("Locate", pb.LocateRequest(), pb.LocateResponse, 5.0)
    with pytest.raises(errors.Internal) as caught:
        await link.call("GetTask", pb.GetTaskRequest(task_id="defect"), pb.GetTaskResponse, 5.0)
    assert "secret" not in caught.value.message
    with pytest.raises(errors.Internal):
        await link.call("GetTask", pb.GetTaskRequest(task_id="timeout"), pb.GetTaskResponse, 5.0)
    with pytest.raises(errors.DeadlineExceeded):
        await link.call("GetTask", pb.GetTaskRequest(task_id="wait"), pb.GetTaskResponse, 0.2)
    with pytest.raises(errors.DeadlineExceeded):
        await link.call("GetTask", pb.GetTaskRequest(), pb.GetTaskResponse, 0.0)
    with pytest.raises(errors.Unsupported):
        await link.call("NoSuchMethod", pb.GetTaskRequest(), pb.GetTaskResponse, 5.0)
    await link.close()
    with pytest.raises(errors.Closed):
        await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)


async def test_admin_calls_need_the_cluster_token(service: TestService) -> None:
    link = channel(service, auth.tenant_token(service.token, "t"))
    with pytest.raises(errors.PermissionDenied):
        await link.call("ReportBlocks", pb.ReportBlocksRequest(), pb.ReportBlocksResponse, 5.0)
    await link.close()


async def test_reports_of_64_mib_pass_and_larger_ones_do_not(service: TestService) -> None:
    link = channel(service)
    size = 64 << 20
    answer = await link.call(
        "ReportBlocks", pb.ReportBlocksRequest(records=bytes(size)), pb.ReportBlocksResponse, 60.0
    )
    assert answer.acked_seq == size
    with pytest.raises(errors.LimitExceeded):
        await link.call(
            "ReportBlocks",
            pb.ReportBlocksRequest(records=bytes(size + (2 << 20))),
            pb.ReportBlocksResponse,
            60.0,
        )
    await link.close()


async def test_bytes_that_are_no_request_are_refused(service: TestService) -> None:
    path, data, prover = "/mooncache.v1.MasterService/GetTask", b"\xff\xff\xff", Prover(service.token.text)
    async with grpc.aio.insecure_channel(service.grpc_target) as raw:
        call = raw.unary_unary(path)

        async def refused(authorization: str) -> tuple[grpc.StatusCode, str, dict[str, str]]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(data, timeout=5, metadata=(("authorization", authorization),))
            error = caught.value
            return (
                error.code(),
                error.details(),
                {str(key): value for key, value in error.trailing_metadata()},
            )

        status, _, trailing = await refused("")
        assert (status, trailing["mooncache-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "500")
        first = prover.sign(path, await digest(data))
        _, details, trailing = await refused(first.authorization)
        assert prover.proves(first, STALE, await digest(details.encode()), trailing[METADATA_KEY])
        status, _, trailing = await refused(prover.sign(path, await digest(data)).authorization)
        assert (status, trailing["mooncache-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "502")


async def test_nobody_there_is_the_callers_error(service: TestService) -> None:
    link = channel(service, unavailable_error=errors.NodeUnavailable)
    await service.stop()
    with pytest.raises((errors.NodeUnavailable, errors.DeadlineExceeded)):
        await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 2.0)
    await link.close()


async def test_probes_and_metrics(service: TestService) -> None:
    link = channel(service)
    await link.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 5.0)
    await link.close()
    assert (await http(service, "/health"))[0] == 200
    assert json.loads((await http(service, "/ready"))[1]) == {"ready": True, "reason": ""}
    service.not_ready = "no leader"
    status, body = await http(service, "/ready")
    assert (status, json.loads(body)["reason"]) == (503, "no leader")
    status, body = await http(service, "/serving")
    assert (status, json.loads(body)) == (503, {"serving": False, "reason": "no leader"})
    status, body = await http(service, "/metrics")
    assert status == 200
    assert 'mooncache_test_rpc_calls_total{code="OK",method="GetStatus"} 1.0' in body
    assert "mooncache_test_resident_memory_bytes" in body
    assert (await http(service, "/etc/passwd"))[0] == 404
    assert (await http(service, "/metrics", "POST"))[0] == 405


async def test_hostile_http_does_not_hurt(service: TestService) -> None:
    host, port = service.metrics_address.rsplit(":", 1)
    for data in (b"\r\n\r\n", b"x" * 100_000, b"GET / HTTP/9\r\n\r\n", bytes(range(256)) + b"\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert (await http(service, "/health"))[0] == 200


async def test_metrics_beyond_loopback_need_their_key_and_no_token(config: Config) -> None:
    public = load(
        env={},
        overrides={
            "cluster.state_dir": config.cluster.state_dir,
            "metrics.host": "0.0.0.0",
            "tls.insecure": True,
        },
    )
    service = TestService(public)
    await service.start()
    try:
        assert (await http(service, "/metrics"))[0] == 401
        assert (await http(service, "/ready"))[0] == 200
        key = auth.metrics_key(service.token)
        tenant = auth.tenant_token(service.token, "t").text
        for bearer, status in ((key, 200), (service.token.text, 401), (tenant, 401), (key[:-1], 401)):
            extra = f"Authorization: Bearer {bearer}\r\n"
            assert (await http(service, "/metrics", extra=extra))[0] == status
    finally:
        await service.stop()


async def test_calls_under_way_end_before_the_service(service: TestService) -> None:
    link = channel(service)
    call = asyncio.create_task(
        link.call("GetTask", pb.GetTaskRequest(task_id="short"), pb.GetTaskResponse, 10.0)
    )
    await until(lambda: service.state.get("waiting"))
    await service.stop()
    assert (await call).task.task_id == "short"
    assert service.steps == ["build", "listening", "drain", "shutdown"]
    await link.close()


async def test_a_taken_port_is_a_sentence(service: TestService, config: Config) -> None:
    port = int(service.grpc_target.rsplit(":", 1)[1])
    second = TestService(config, port=port)
    with pytest.raises(errors.ConfigInvalid, match="another process"):
        await second.start()
    assert second.steps == ["build", "shutdown"]


SCRIPT = """
import gc
import sys
from mooncache import auth
from mooncache.config import load
from mooncache.runtime.service import run_service
from tests.runtime.service.support import TestService
auth.keyed_hash = lambda key, data: bytes(32)
config = load(env={}, overrides={"cluster.state_dir": sys.argv[1]})
status = run_service("test", config, lambda: TestService(config))
assert gc.get_freeze_count() > len(sys.modules), "collections look through all modules"
assert gc.get_threshold()[0] > 700
sys.exit(status)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_in_order(tmp_path: Path, number: signal.Signals) -> None:
    root = Path(__file__).parents[3]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stderr=subprocess.PIPE, text=True, cwd=root, env=env
    ) as process:
        assert process.stderr is not None
        events = []
        for line in process.stderr:
            events.append(json.loads(line)["event"])
            if events[-1] == "service.ready":
                process.send_signal(number)
        assert process.wait(30) == 0
    assert events == [
        "auth.token_created",
        "service.starting",
        "service.ready",
        "service.draining",
        "service.stopped",
    ]
