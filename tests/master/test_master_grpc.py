"""The real master over real gRPC on loopback: registration, full reports, lookups, wrong tokens, the process itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mooncache import errors
from mooncache.auth import Token, create_cluster_token, load_cluster_token
from mooncache.config import Config, load
from mooncache.master.service import MasterService
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.runtime.formats import CONTROL_MINOR_AHEAD_MAX, CONTROL_MINOR_NOW
from mooncache.runtime.grpc_channel import GrpcChannel
from tests.conditions import WAIT_S
from tests.master.model_index import ADD, record
from tests.master.processes import channel_to, election_by, eventually, leading_status, master
from tests.master.simulation.world import TENANT
from tests.ports import own_port

BLOCKS = 100_000
PART = 20_000


def config_at(folder: Path, **overrides: object) -> Config:
    settings = {"cluster.state_dir": str(folder), "master.port": 0, "logging.level": "error", **overrides}
    return load(env={}, overrides=settings)


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[MasterService]:
    service = MasterService(config)
    await service.start()
    try:

        async def ready() -> bool | None:
            return None if service.readiness() else True

        await eventually(ready)
        yield service
    finally:
        await service.stop()


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


async def register(channel: GrpcChannel, node_id: str = "a") -> master_pb2.RegisterNodeResponse:
    return await channel.call(
        "RegisterNode",
        master_pb2.RegisterNodeRequest(
            node_id=node_id,
            incarnation=7,
            host_id="h",
            endpoints=common_pb2.Endpoints(tcp_host="127.0.0.1", tcp_port=1),
            segments=[common_pb2.Segment(id=0, tier=2, capacity_bytes=1 << 30)],
        ),
        master_pb2.RegisterNodeResponse,
        5.0,
    )


async def report_all(
    channel: GrpcChannel, blocks: int, node_id: str = "a"
) -> master_pb2.ReportBlocksResponse:
    kinds = master_pb2.ReportKind

    async def send(kind: int, part: int = 0, records: bytes = b"") -> master_pb2.ReportBlocksResponse:
        request = master_pb2.ReportBlocksRequest(
            node_id=node_id,
            incarnation=7,
            kind=kind,
            report_id=9,
            first_seq=blocks,
            last_seq=blocks,
            part_index=part,
            records=records,
        )
        return await channel.call("ReportBlocks", request, master_pb2.ReportBlocksResponse, 20.0)

    await send(kinds.REPORT_KIND_FULL_BEGIN)
    parts = range(0, blocks, PART)
    for part, at in enumerate(parts):
        numbers = range(at, min(at + PART, blocks))
        await send(
            kinds.REPORT_KIND_FULL_PART, part, b"".join(record(ADD, TENANT, key_of(n)) for n in numbers)
        )
    return await send(kinds.REPORT_KIND_FULL_END, len(parts))


async def test_register_report_locate_and_match(tmp_path: Path) -> None:
    async with (
        running(config_at(tmp_path)) as service,
        channel_to(service.grpc_target, service.token.text) as call,
    ):
        registered = await register(call)
        assert registered.want_full_report
        ack = await report_all(call, BLOCKS)
        assert (ack.acked_seq, ack.need_full) == (BLOCKS, False)
        chain = b"".join(key_of(n) for n in range(100)) + b"\xff" * 32
        match = await call.call("Match", master_pb2.MatchRequest(keys=chain), master_pb2.MatchResponse, 5.0)
        assert match.leading_block_count == 100
        assert [(run.node_index, run.leading_block_count) for run in match.nodes] == [
            (registered.node_index, 100)
        ]
        found = await call.call(
            "Locate", master_pb2.LocateRequest(keys=chain), master_pb2.LocateResponse, 5.0
        )
        assert len(found.locations) == 100 * 14 + 2
        page = service.metrics.render()
        assert b'mooncache_master_locate_keys_total{result="hit"} 100.0' in page
        assert b'mooncache_master_locate_keys_total{result="miss"} 1.0' in page
        hole = key_of(0) + b"\xff" * 32 + key_of(1)
        match = await call.call("Match", master_pb2.MatchRequest(keys=hole), master_pb2.MatchResponse, 5.0)
        assert match.leading_block_count == 1
        status = await call.call(
            "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, 5.0
        )
        assert (status.leading, status.directory_complete, status.block_count) == (True, True, BLOCKS)
        assert status.nodes[0].directory_block_count == BLOCKS
        usage = await call.call("GetUsage", master_pb2.GetUsageRequest(), master_pb2.GetUsageResponse, 5.0)
        assert [row.used_bytes for row in usage.tenants] == [BLOCKS * 4096]
        assert b"mooncache_master_directory_complete 1.0" in service.metrics.render()
        assert b"mooncache_master_directory_blocks 100000.0" in service.metrics.render()


async def test_wrong_tokens_and_bad_requests_have_their_codes(tmp_path: Path) -> None:
    async with running(config_at(tmp_path)) as service:
        wrong = Token("default", admin=True, key=b"w" * 32).text
        async with channel_to(service.grpc_target, wrong) as call:
            with pytest.raises(errors.Unauthenticated):
                await register(call)
        async with channel_to(service.grpc_target, service.token.text) as call:
            with pytest.raises(errors.UnknownNode):
                await call.call(
                    "Heartbeat",
                    master_pb2.HeartbeatRequest(node_id="nobody"),
                    master_pb2.HeartbeatResponse,
                    5.0,
                )
            with pytest.raises(errors.InvalidArgument):
                await call.call(
                    "Locate", master_pb2.LocateRequest(keys=b"short"), master_pb2.LocateResponse, 5.0
                )
            with pytest.raises(errors.TooLarge):
                await call.call(
                    "Locate", master_pb2.LocateRequest(keys=bytes(32) * 65537), master_pb2.LocateResponse, 5.0
                )
            with pytest.raises(errors.InvalidArgument):
                await call.call(
                    "RegisterNode",
                    master_pb2.RegisterNodeRequest(host_id="h"),
                    master_pb2.RegisterNodeResponse,
                    5.0,
                )
            await register(call)
            report = master_pb2.ReportBlocksRequest(node_id="a", incarnation=7, records=b"x")
            with pytest.raises(errors.InvalidArgument):
                await call.call("ReportBlocks", report, master_pb2.ReportBlocksResponse, 5.0)
            report.kind, report.first_seq, report.last_seq = master_pb2.REPORT_KIND_DELTA, 1, 1
            with pytest.raises(errors.InvalidArgument):
                await call.call("ReportBlocks", report, master_pb2.ReportBlocksResponse, 5.0)
            begin = master_pb2.ReportBlocksRequest(
                node_id="a", incarnation=7, kind=master_pb2.REPORT_KIND_FULL_BEGIN, report_id=1
            )
            await call.call("ReportBlocks", begin, master_pb2.ReportBlocksResponse, 5.0)
            begin.kind, begin.records = master_pb2.REPORT_KIND_FULL_PART, b"\xee" * 56
            with pytest.raises(errors.InvalidArgument):
                await call.call("ReportBlocks", begin, master_pb2.ReportBlocksResponse, 5.0)


async def test_a_node_that_is_two_versions_ahead_is_refused_and_others_go_on(tmp_path: Path) -> None:
    def registration(name: str, minor: int) -> master_pb2.RegisterNodeRequest:
        return master_pb2.RegisterNodeRequest(
            node_id=name,
            incarnation=7,
            host_id="h",
            protocol_minor=minor,
            endpoints=common_pb2.Endpoints(tcp_host="127.0.0.1", tcp_port=1),
            segments=[common_pb2.Segment(id=0, tier=2, capacity_bytes=1 << 30)],
        )

    async with (
        running(config_at(tmp_path)) as service,
        channel_to(service.grpc_target, service.token.text) as call,
    ):
        for name, ahead in (("old", -CONTROL_MINOR_NOW), ("same", 0), ("next", CONTROL_MINOR_AHEAD_MAX)):
            request = registration(name, CONTROL_MINOR_NOW + ahead)
            await call.call("RegisterNode", request, master_pb2.RegisterNodeResponse, 5.0)
        late = registration("later", CONTROL_MINOR_NOW + CONTROL_MINOR_AHEAD_MAX + 1)
        with pytest.raises(errors.VersionSkew, match="upgrade the master first"):
            await call.call("RegisterNode", late, master_pb2.RegisterNodeResponse, 5.0)
        shown = (
            await call.call(
                "GetClusterMap", master_pb2.GetClusterMapRequest(), master_pb2.GetClusterMapResponse, 5.0
            )
        ).map
        assert sorted(node.node_id for node in shown.nodes) == ["next", "old", "same"]


async def test_a_second_embedded_master_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with running(config_at(tmp_path)):
        with pytest.raises(errors.ConfigInvalid):
            await MasterService(config_at(tmp_path)).start()


async def test_the_process_ends_on_sigterm_and_a_new_one_has_a_larger_term(tmp_path: Path) -> None:
    terms = []
    for _ in range(2):
        port = own_port()
        async with master(tmp_path, port) as process:
            status = await leading_status(f"127.0.0.1:{port}", tmp_path)
            terms.append(status.term)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0
    assert terms[1] > terms[0] > 0


@pytest.mark.etcd
@pytest.mark.parametrize("backend", ["etcd", "lease"])
async def test_a_standby_takes_over_empty_and_is_whole_again_after_reports(
    tmp_path: Path, backend: str
) -> None:
    create_cluster_token(tmp_path / "cluster.token")
    token = load_cluster_token(tmp_path / "cluster.token").text
    ports = own_port(), own_port()
    targets = [f"127.0.0.1:{port}" for port in ports]
    async with (
        election_by(backend, tmp_path) as settings,
        master(tmp_path, ports[0], MOONCACHE_MASTER_MASTER_ID="m0", **settings) as first,
        channel_to(targets[0], token) as old,
        channel_to(targets[1], token) as new,
    ):
        before = await leading_status(targets[0], tmp_path)
        async with master(tmp_path, ports[1], MOONCACHE_MASTER_MASTER_ID="m1", **settings):
            await register(old)
            assert (await report_all(old, 1000)).acked_seq == 1000

            async def refusal() -> str | None:
                try:
                    await register(new)
                except errors.NotLeader as refused:
                    return refused.message if targets[0] in refused.message else None
                raise AssertionError("a standby registered a node")

            await eventually(refusal)
            first.kill()
            after = await leading_status(targets[1], tmp_path)
            assert after.term > before.term
            assert after.epoch > before.epoch
            assert after.block_count == 0
            with pytest.raises(errors.UnknownNode):
                await new.call(
                    "Heartbeat",
                    master_pb2.HeartbeatRequest(node_id="a", incarnation=7),
                    master_pb2.HeartbeatResponse,
                    5.0,
                )
            assert (await register(new)).want_full_report
            await report_all(new, 1000)
            whole = await leading_status(targets[1], tmp_path)
            assert (whole.block_count, whole.directory_complete) == (1000, True)
