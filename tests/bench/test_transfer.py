"""The transfer benchmark moves bytes over each transport, reads other tools' output, and says what it lacks."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from mooncache.bench.transfer import TransferOptions, cases, engines, nixl_lane, references, run
from mooncache.bench.transfer.cases import BlockFlow, Case, Samples, percentile_us
from mooncache.bench.transfer.command import transfer
from mooncache.bench.transfer.node import start_server
from mooncache.bench.transfer.options import parse_size
from mooncache.bench.worker import WorkerError
from mooncache.errors import InvalidArgument, TransportUnavailable
from mooncache.reporting.rows import Report

TINY = TransferOptions(
    transports=("loopback", "shm", "tcp"),
    block_bytes=(4096, 70_001),
    batches=(3,),
    threads=(2,),
    rounds=1,
    duration_ms=5,
    references=False,
    arena_bytes=64 << 20,
)


def test_every_transport_gives_throughput_latency_and_processor_time() -> None:
    report, samples = run(TINY, lambda _: None)
    assert len(samples) == 3 * 2 * 2, report.notes
    for case in samples:
        mine = {row.unit for row in report.rows if row.name == str(case) or row.name.startswith(f"{case} ")}
        assert mine == {"GB/s", "us", "CPU s/GB"}
    assert all(row.value > 0 for row in report.rows if row.unit in {"GB/s", "us"})


def test_yardsticks_stand_beside_the_rows() -> None:
    options = TransferOptions(
        ("shm", "tcp"), ("read",), (8192,), (2,), (1,), rounds=1, duration_ms=5, arena_bytes=64 << 20
    )
    report, _ = run(options, lambda _: None)
    rows = {row.name: row for row in report.rows}
    assert rows["shm read 8 KiB x2 t1"].against == "memcpy 8 KiB x2"
    assert rows["tcp read 8 KiB x2 t1"].against == "raw socket read 8 KiB x2"
    assert rows["tcp read 8 KiB x2 t1"].ratio is not None


def test_over_rdma_batches_and_streams_stand_beside_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {BlockFlow.BATCH: 1.0, BlockFlow.STREAM: 3.0, BlockFlow.STREAM_UNCHECKED: 3.6}
    monkeypatch.setattr(cases, "measure", lambda case, *_: Samples([rates[case.flow]], [1.0], [1.0]))
    monkeypatch.setattr(cases, "rdma_device", lambda: "rxe0")
    tool = iter([2.0, 4.0, 9.0])
    monkeypatch.setattr(references, "perftest", lambda *_: {"read": next(tool)})
    options = TransferOptions(("rdma",), ("read",), (1 << 20,), (8,), (1,), rounds=3)
    report, rounds = Report("bench"), {}
    samples = cases.measure_all(options, ("rdma",), {}, None, report, lambda _: None, rounds)
    yardsticks = cases.reference_rows(report, options, list(samples), lambda _: None, rounds)
    cases.add_rows(report, samples, yardsticks)
    rows = {row.name: row for row in report.rows}
    assert rows["ib_read_bw 1 MiB x8"].value == 4.0  # the median of the rounds
    name = "rdma read 1 MiB x8 t1"
    assert (rows[name].ratio, rows[name].met) == (0.25, None)
    assert (rows[f"{name} stream"].ratio, rows[f"{name} stream"].met) == (0.75, False)
    assert (rows[f"{name} stream unchecked"].ratio, rows[f"{name} stream unchecked"].met) == (0.9, True)


def test_beside_the_tool_a_case_has_its_device_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []

    def measure(case: Case, peer: dict[str, object], duration_ms: int, _: object) -> Samples:
        asked.append((case.transport, str(peer.get("rdma_devices")), duration_ms))
        return Samples([1.0], [1.0], [1.0])

    monkeypatch.setattr(cases, "measure", measure)
    monkeypatch.setattr(cases, "rdma_device", lambda: "rxe0")
    monkeypatch.setattr(references, "perftest", lambda *_: "none")
    options = TransferOptions((), ("read",), (4096,), (1,), (1,), rounds=1, duration_ms=5)
    report = Report("bench")
    cases.measure_all(options, ("tcp", "rdma"), {}, None, report, lambda _: None, {})
    assert set(asked) == {("tcp", "None", 5), ("rdma", "['rxe0']", 2000)}
    asked.clear()
    cases.measure_all(options, ("rdma",), {}, None, report, lambda _: None, None)
    assert set(asked) == {("rdma", "None", 5)}


@pytest.mark.deep
@pytest.mark.skipif(nixl_lane.unavailable_reason() is not None, reason="NIXL is not installed")
def test_plain_nixl_is_the_yardstick_of_our_link_over_it() -> None:
    options = TransferOptions(
        ("nixl",), ("read", "write"), (8192,), (2,), (1,), rounds=1, duration_ms=5, arena_bytes=64 << 20
    )
    report, _ = run(options, lambda _: None)
    rows = {row.name: row for row in report.rows}
    for way in ("read", "write"):
        assert rows[f"nixl {way} 8 KiB x2 t1"].against == f"NIXL over UCX {way} 8 KiB x2", report.notes
        assert rows[f"NIXL over UCX {way} 8 KiB x2"].value > 0


def test_a_transport_that_cannot_run_is_a_note() -> None:
    peer = {"tcp_host": "127.0.0.1", "tcp_port": 1, "unix_path": "", "token": f"mcc1.{'00' * 32}"}
    report, samples = run(TINY, lambda _: None, peer)
    assert not samples
    assert any(note.startswith("tcp was left out:") for note in report.notes)


def test_what_one_number_of_threads_refuses_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: Case, *_: object) -> Samples:
        if case.threads == 2:
            raise InvalidArgument("one thread only")
        return Samples([1.0], [1.0], [1.0])

    monkeypatch.setattr(cases, "measure", measure)
    options = TransferOptions(("nixl",), ("read",), (4096, 8192), (1,), (1, 2), rounds=2, references=False)
    report = Report("bench")
    samples = cases.measure_all(options, ("nixl",), {}, None, report, lambda _: None)
    assert {case.block_bytes: len(found.gb_per_s) for case, found in samples.items()} == {4096: 2, 8192: 2}
    assert report.notes == ["nixl with 2 threads was left out: INVALID_ARGUMENT (100): one thread only"]


def test_a_node_of_nixl_that_does_not_start_leaves_out_nixl_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object, **__: object) -> None:
        raise WorkerError("ended")

    monkeypatch.setattr(nixl_lane, "unavailable_reason", lambda: None)
    monkeypatch.setattr(nixl_lane, "Worker", dies)
    with pytest.raises(TransportUnavailable, match="ended"):
        nixl_lane.measure_nixl(write=False, block_bytes=4096, batch=1, threads=1, duration_ms=1)


def test_a_tool_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_TIMEOUT_S", 0.2)
    silent = references._start([sys.executable, "-c", "import time; time.sleep(20)"])
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError, match="did not start"):
        references._segment(silent)
    references._end(silent)
    assert time.monotonic() - begun_s < 15


def test_two_hosts_share_a_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = bytes(range(32))
    server = start_server("127.0.0.1", 0, "", secret, 64 << 20)
    token_file = tmp_path / "token"
    token_file.write_text(f"mcc1.{secret.hex()}\n")
    address = f"127.0.0.1:{server.endpoints()['tcp_port']}"
    wanted = {"transport": ("tcp",), "block": ("4K",), "quick": True, "json": tmp_path / "rows.json"}
    try:
        assert transfer(connect=address, token_file=token_file, **wanted) == 0  # type: ignore[arg-type]
        token_file.write_text(f"mcc1.{'00' * 32}\n")
        assert transfer(connect=address, token_file=token_file, **wanted) == 1  # type: ignore[arg-type]
    finally:
        server.stop(1.0)
    assert "tcp read 4 KiB x8 t1" in (tmp_path / "rows.json").read_text()
    assert "UNAUTHENTICATED" in capsys.readouterr().out


def test_serving_prints_where_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    from mooncache.bench.transfer.node import serve_forever

    stop = threading.Event()
    stop.set()
    begun = time.monotonic()
    assert serve_forever("127.0.0.1", 0, bytes(32), 16 << 20, stop) == 0
    assert time.monotonic() - begun < 30
    assert capsys.readouterr().out.startswith("listening on 127.0.0.1 port ")


@pytest.mark.parametrize(
    "wrong",
    [
        {"transport": ("pigeon",)},
        {"direction": ("sideways",)},
        {"block": ("many",)},
        {"batch": (0,)},
        {"threads": (65,)},
        {"rounds": 0},
        {"memory": "tape"},
        {"connect": "nowhere"},
        {"connect": "127.0.0.1:1"},
        {"serve": "127.0.0.1:1"},
    ],
)
def test_wrong_arguments_are_told(wrong: dict[str, object]) -> None:
    assert transfer(**wrong) == 2  # type: ignore[arg-type]


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "64k", "1M", "2MiB", "1G")] == [
        4096,
        65_536,
        1 << 20,
        2 << 20,
        1 << 30,
    ]
    for wrong in ("", "0", "-1", "1.5M", "M"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(wrong)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile_us(values, 50), percentile_us(values, 99)) == (50.0, 99.0)
    assert percentile_us([7.0], 99) == 7.0


def test_other_tools_output_is_read() -> None:
    table = (
        " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]\n"
        " 1048576    5000             1200.00            1000.00             0.001\n"
    )
    assert references.parse_perftest(table) == pytest.approx(1.048576)
    with pytest.raises(ValueError, match="no row"):
        references.parse_perftest("Couldn't connect")
    assert references.parse_iperf3('{"end": {"sum_received": {"bits_per_second": 8e9}}}') == 1.0
    assert references.parse_original("duration 3.01, batch count 143, throughput 0.4012 GB/s") == 0.4012
    with pytest.raises(ValueError, match="no throughput"):
        references.parse_original("")


def test_plot_and_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mooncache.bench.transfer import plot

    samples = {
        Case("tcp", "read", size, 8, 1): Samples([rate], [0.5], [100.0])
        for size, rate in ((1024, 0.5), (1 << 20, 2.0))
    }
    plot.write_svg(samples, tmp_path / "t.svg")
    plot.write_html(samples, "| what |", tmp_path / "t.html")
    assert "The fastest is tcp read at 1 MiB: 2.00 GB/s" in (tmp_path / "t.svg").read_text()
    assert "<svg" in (tmp_path / "t.html").read_text()


def test_engines_beside_each_other() -> None:
    """A lane of ours moves bytes; a bar compares with the same case on the same wire, and stays open without it."""
    for wire in ("tcp", "shm"):
        lane = engines.Lane(engines.LaneKind("mooncache", wire, ()), 256 << 10)
        try:
            for write in (False, True):
                assert lane.gb_per_s(write=write, block_bytes=64 << 10, batch=4, seconds=0.01) > 0
        finally:
            lane.close()
    case = engines.case_name(1 << 20, 64, write=False)
    assert case == "read 1 MiB x64"
    report = Report("engines")
    engines.add_rows(report, {("mooncache tcp", case): 3.0, ("nixl tcp", case): 1.5})
    verdicts = {row.against: (row.ratio, row.met) for row in report.rows if row.against}
    assert verdicts == {f"nixl tcp {case}": (2.0, True), f"original tcp {case}": (None, None)}
