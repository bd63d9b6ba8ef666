"""The yardsticks of the transfer benchmark: each wire's own tool, and the original's benchmark, when installed.

Every function returns GB/s by row name, or the sentence why there is nothing. They are other people's programs: each
runs as processes of its own with a time limit, and its last lines are parsed, nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mooncache.bench.store.raw_socket import RawSocket
from mooncache.bench.transfer.nixl_lane import measure_plain
from mooncache.bench.transfer.options import Direction
from mooncache.bench.worker import find_tool
from mooncache.errors import TransportUnavailable
from mooncache.runtime.ports import hold_port, port_of

DURATION_S = 2
_MARGIN_S = 1
_TIMEOUT_S = 30.0
ReferenceFigures = dict[Direction, float]


def raw_socket(block_bytes: int, batch: int, duration_s: float) -> ReferenceFigures:
    """A batch of blocks over one plain socket of two Python processes: `read` and `write` in GB/s."""
    total = block_bytes * batch
    memory = memoryview(bytearray(total))
    raw = RawSocket(block_bytes, batch, min(block_bytes, 64 << 10))
    figures: ReferenceFigures = {}
    try:
        for direction, once in ((Direction.READ, raw.get_s), (Direction.WRITE, raw.put_s)):
            once(memory)
            moved, spent, end = 0, 0.0, time.perf_counter() + duration_s
            while not moved or time.perf_counter() < end:
                spent += once(memory)
                moved += total
            figures[direction] = moved / spent / 1e9
    finally:
        raw.close()
    return figures


def memcpy(block_bytes: int, batch: int, duration_s: float) -> float:
    """GB/s of copying the same bytes inside this process."""
    source, target = memoryview(bytearray(block_bytes * batch)), memoryview(bytearray(block_bytes * batch))
    target[:] = source
    moved, begun = 0, time.perf_counter()
    while not moved or time.perf_counter() - begun < duration_s:
        target[:] = source
        moved += len(source)
    return moved / (time.perf_counter() - begun) / 1e9


def _free_port() -> int:
    """A port that was free a moment ago: some programs cannot listen on a port that is held."""
    with hold_port("127.0.0.1") as held:
        return port_of(held)


def iperf3() -> ReferenceFigures | str:
    """TCP over loopback with one stream, as iperf3 does it: `read` (its -R) and `write`."""
    if shutil.which("iperf3") is None:
        return "iperf3 is not installed (Debian package iperf3)"
    port = _free_port()
    figures: ReferenceFigures = {}
    for direction, extra in ((Direction.WRITE, []), (Direction.READ, ["-R"])):
        client = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", str(DURATION_S), "-J", *extra]
        try:
            figures[direction] = parse_iperf3(_between(["iperf3", "-s", "-1", "-p", str(port)], client))
        except (RuntimeError, ValueError, KeyError) as error:
            return f"iperf3 gave no figure: {error}"
    return figures


def parse_iperf3(text: str) -> float:
    """GB/s that arrived, from `iperf3 -J`."""
    return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8e9


def nixl(block_bytes: int, batch: int, duration_s: float) -> ReferenceFigures | str:
    """NIXL's own requests over UCX between two processes here; the reason when there is none."""
    try:
        return {
            direction: measure_plain(
                write=direction is Direction.WRITE,
                block_bytes=block_bytes,
                batch=batch,
                duration_s=duration_s,
            )
            for direction in Direction
        }
    except TransportUnavailable as error:
        return error.message


def perftest(device: str, block_bytes: int, batch: int) -> ReferenceFigures | str:
    """`ib_write_bw` and `ib_read_bw` between two processes here, over `device`."""
    figures: ReferenceFigures = {}
    for direction in Direction:
        tool = f"ib_{direction}_bw"
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian package perftest)"
        common = [
            tool,
            "-d",
            device,
            "-s",
            str(block_bytes),
            *(
                "-D",
                str(DURATION_S + 2 * _MARGIN_S),
                "-f",
                str(_MARGIN_S),
            ),  # by itself it leaves 2 s out at each end
            *("-t", str(max(2, batch))),  # messages under way, as many as ours
            *("-x", str(_routable_gid(device))),
            "-p",
            str(_free_port()),
            "-F",
        ]
        try:
            figures[direction] = parse_perftest(_between(common, [*common, "127.0.0.1"]))
        except (RuntimeError, ValueError) as error:
            return f"{tool} gave no figure: {error}"
    return figures


def _routable_gid(device: str) -> int:
    """The entry of the first port's GID table that RoCE v2 over IPv4 uses; 0 when there is none, as on InfiniBand."""
    folder = Path("/sys/class/infiniband") / device / "ports" / "1"
    for index in range(16):
        try:
            kind = (folder / "gid_attrs" / "types" / str(index)).read_text()
            gid = (folder / "gids" / str(index)).read_text()
        except OSError:
            continue
        if "RoCE v2" in kind and gid.startswith("0000:0000:0000:0000:0000:ffff:"):
            return index
    return 0


def parse_perftest(text: str) -> float:
    """GB/s (average) from perftest's table, whose columns are bytes, iterations, peak, average, rate; in MiB/s."""
    rows = [line.split() for line in text.splitlines() if re.match(r"^\s*\d+\s+\d+\s+[\d.]+\s+[\d.]+", line)]
    if not rows:
        raise ValueError("its output has no row of figures")
    return float(rows[-1][3]) * (1 << 20) / 1e9


def original_engine(block_bytes: int, batch: int, threads: int) -> ReferenceFigures | str:
    """The original's own `transfer_engine_bench` over TCP between two processes here."""
    tool = find_tool("transfer_engine_bench")
    if tool is None:
        return "transfer_engine_bench is not installed (the extra called bench brings it)"
    buffer_bytes = max(256 << 20, 2 * block_bytes * batch * threads)
    common = [
        tool,
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        f"--buffer_size={buffer_bytes}",
    ]
    target = _start([*common, "--mode=target", f"--local_server_name=127.0.0.1:{_free_port()}"])
    figures: ReferenceFigures = {}
    try:
        segment = _segment(target)
        for direction in Direction:
            text = _client(
                [
                    *common,
                    "--mode=initiator",
                    f"--local_server_name=127.0.0.1:{_free_port()}",
                    f"--segment_id={segment}",
                    f"--operation={direction}",
                    f"--block_size={block_bytes}",
                    f"--batch_size={batch}",
                    f"--threads={threads}",
                    f"--duration={DURATION_S}",
                    "--report_precision=4",
                ]
            )
            figures[direction] = parse_original(text)
    except (RuntimeError, ValueError) as error:
        return f"transfer_engine_bench gave no figure: {error}"
    finally:
        _end(target)
    return figures


def parse_original(text: str) -> float:
    """GB/s from the last "throughput ..." of its log."""
    found = re.findall(r"throughput ([\d.]+) GB/s", text)
    if not found:
        raise ValueError("its log has no throughput")
    return float(found[-1])


def _segment(target: subprocess.Popen[str]) -> str:
    """Wait until the target prints its address (it logs to stderr, which _start joins to stdout)."""
    assert target.stdout is not None
    alarm = threading.Timer(_TIMEOUT_S, target.kill)  # ends the loop whatever the target says, or does not
    alarm.start()
    try:
        for line in target.stdout:
            if found := re.search(r"listening on ([\d.]+:\d+)", line):
                return found[1]
    finally:
        alarm.cancel()
    raise RuntimeError("the target did not start")


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _between(server: Sequence[str], client: Sequence[str]) -> str:
    """What a tool's client prints while its server runs."""
    running = _start(server)
    try:
        return _client(client)
    finally:
        _end(running)


def _client(command: Sequence[str]) -> str:
    """Run until it succeeds: the server may need a moment to listen."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(str(error)) from error
        if done.returncode == 0:
            return done.stdout
        if time.monotonic() > deadline_s - _TIMEOUT_S / 2:
            raise RuntimeError(done.stdout.strip()[-200:] or f"exit code {done.returncode}")
        time.sleep(0.2)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
