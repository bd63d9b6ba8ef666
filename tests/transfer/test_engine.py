"""Transfer engines in processes of their own: bytes, grants, and what happens when the other side goes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors as err
from mooncache.auth import parse_token, tenant_token
from mooncache.bench.worker import Worker
from mooncache.transfer import EnginePeer, TransferEngine
from tests.conditions import wait_until
from tests.processes import freeze

MIB = 1 << 20
TOKEN = f"mcc1.{secrets.token_hex(32)}"
ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., Worker]


def begin(name: str, wire: str) -> Worker:
    """A process with an engine; `wire`: "shm" where memory may be shared, or "tcp"."""
    path = os.pathsep.join([str(ROOT), *(part for part in sys.path if part)])
    return Worker("tests.transfer.engine_process", [name, TOKEN, wire], env={"PYTHONPATH": path})


@pytest.fixture(scope="module")
def shared_owners() -> Iterator[dict[str, Worker]]:
    running: dict[str, Worker] = {}
    yield running
    for worker in running.values():
        worker.close()


@pytest.fixture
def start(shared_owners: dict[str, Worker]) -> Start:
    """The process "owner" of a wire; the tests share it, so what they stop they let go on."""

    def one(wire: str = "shm") -> Worker:
        if wire not in shared_owners:
            shared_owners[wire] = begin("owner", wire)
        return shared_owners[wire]

    return one


@pytest.fixture
def victim() -> Iterator[Start]:
    """A process of its own for one test."""
    running: list[Worker] = []

    def one(wire: str) -> Worker:
        running.append(begin("owner", wire))
        return running[-1]

    yield one
    for worker in running:
        worker.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    """This process's engine, called "user"."""
    with TransferEngine("user", token=TOKEN, timeout_s=20.0) as running:
        yield running


def add(
    owner: Worker, size: int, *, allocate: bool = False, read: str = "*", write: str = "*"
) -> dict[str, Any]:
    """A region of the other process, with the bytes of seed 1."""
    return owner.ask(
        "add", size=size, seed=1, allocate=allocate, readable_by=[read], writable_by=[write] if write else []
    )


def connect(engine: TransferEngine, region: dict[str, Any]) -> EnginePeer:
    return engine.connect(bytes.fromhex(region["descriptor"]))


@pytest.mark.parametrize(
    ("wire", "allocate", "route"), [("shm", True, "shm"), ("shm", False, "unix"), ("tcp", True, "tcp")]
)
def test_scattered_ranges_go_both_ways(
    start: Start, engine: TransferEngine, wire: str, allocate: bool, route: str
) -> None:
    size = 3 * MIB
    owner = start(wire=wire)
    region = add(owner, size, allocate=allocate)
    expected = bytearray(random.Random(1).randbytes(size))
    with connect(engine, region) as peer:
        assert peer.name == "owner"
        assert (region["address"], size) in [(known.address, known.size_bytes) for known in peer.regions]
        parts = [(5, 100), (MIB - 1, MIB + 3), (2 * MIB + 7, 0), (size - 1, 1)]
        here = [bytearray(length) for _, length in parts]
        reading = peer.read(
            [
                (memory, region["address"] + offset, length)
                for memory, (offset, length) in zip(here, parts, strict=True)
            ]
        )
        reading.wait()
        assert reading.done
        assert reading.route == route
        for memory, (offset, length) in zip(here, parts, strict=True):
            assert memory == expected[offset : offset + length]
        own = engine.register(bytearray(random.Random(2).randbytes(size)))
        peer.write([((own, 10), region["address"] + MIB, MIB), (own.buffer[:9], region["address"], 9)]).wait()
        expected[MIB : 2 * MIB] = own.buffer[10 : 10 + MIB]
        expected[:9] = own.buffer[:9]
        assert owner.ask("digest", index=region["index"])["digest"] == hashlib.sha256(expected).hexdigest()


def test_engines_use_each_other(start: Start, engine: TransferEngine) -> None:
    owner = start()
    own = engine.register(bytearray(b"from here"), readable_by="owner")
    got = owner.ask("read_of", descriptor=engine.describe("owner").hex(), address=own.address, size=9)
    assert got["digest"] == hashlib.sha256(b"from here").hexdigest()
    own.revoke()
    denied = owner.ask("read_of", descriptor=engine.describe().hex(), address=own.address, size=9)
    assert denied["error"] == "PERMISSION_DENIED"
    own.close()
    gone = owner.ask("read_of", descriptor=engine.describe().hex(), address=own.address, size=9)
    assert gone["error"] == "NOT_FOUND"


@pytest.mark.parametrize("allocate", [True, False])
def test_a_range_outside_of_the_grant_is_not_touched(
    start: Start, engine: TransferEngine, allocate: bool
) -> None:
    owner = start()
    region = add(owner, MIB, allocate=allocate, write="another")
    before = owner.ask("digest", index=region["index"])["digest"]
    with connect(engine, region) as peer:
        ours = bytearray(b"x" * MIB)
        with pytest.raises(err.PermissionDenied):
            peer.write([(ours, region["address"], MIB)]).wait()
        with pytest.raises(err.InvalidArgument):
            peer.read([(ours, region["address"] + 1, MIB)]).wait()
        with pytest.raises(err.NotFound):
            peer.read([(ours, region["address"] + MIB, 1)]).wait()
        assert ours == b"x" * MIB
        peer.read([(ours, region["address"], MIB)]).wait()
    assert owner.ask("digest", index=region["index"])["digest"] == before == hashlib.sha256(ours).hexdigest()


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_a_peer_killed_in_mid_transfer_is_a_clean_error(
    victim: Start, engine: TransferEngine, wire: str
) -> None:
    owner = victim(wire)
    region = add(owner, 16 * MIB)
    with connect(engine, region) as peer:
        here = bytearray(16 * MIB)
        transfer = peer.write([(here, region["address"], 16 * MIB)] * 400)
        wait_until(lambda: transfer.route, "the transfer to begin")
        os.kill(owner.pid, signal.SIGKILL)
        with pytest.raises((err.NodeUnavailable, err.ConnectionLost)):
            transfer.wait(20.0)
        with pytest.raises((err.NodeUnavailable, err.ConnectionLost)):
            peer.notify(b"anybody there?")


def test_a_stopped_peer_costs_no_more_than_the_time_limit(start: Start, engine: TransferEngine) -> None:
    owner = start()
    region = add(owner, MIB)
    with connect(engine, region) as peer:
        here = bytearray(MIB)
        freeze(owner.pid)
        try:
            transfer = peer.read([(here, region["address"], MIB)], timeout_s=0.3)
            with pytest.raises(err.DeadlineExceeded):
                transfer.wait(20.0)
            assert transfer.done
        finally:
            os.kill(owner.pid, signal.SIGCONT)
        here[:] = bytes(MIB)
        peer.read([(bytearray(8), region["address"], 8)]).wait()
        assert here == bytes(MIB)  # the late answer went nowhere


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_memory_taken_back_in_mid_transfer_is_not_written(
    start: Start, engine: TransferEngine, wire: str
) -> None:
    owner = start(wire=wire)
    region = add(owner, 16 * MIB)
    with connect(engine, region) as peer:
        transfer = peer.write([(bytearray(16 * MIB), region["address"], 16 * MIB)] * 400)
        wait_until(lambda: transfer.route, "the transfer to begin")
        assert owner.ask("take_back", index=region["index"])["untouched"]
        with pytest.raises((err.PermissionDenied, err.NotFound)):
            transfer.wait(20.0)


def test_cancelling_leaves_local_memory_alone(start: Start, engine: TransferEngine) -> None:
    owner = start(wire="tcp")
    region = add(owner, 16 * MIB)
    with connect(engine, region) as peer:
        here = bytearray(16 * MIB)
        transfer = peer.read([(here, region["address"], 16 * MIB)] * 400)
        wait_until(lambda: transfer.route, "the transfer to begin")
        transfer.cancel()
        with pytest.raises(err.Cancelled):
            transfer.wait()
        here[:] = bytes(len(here))
        peer.read([(bytearray(8), region["address"], 8)]).wait()
        assert here == bytes(len(here))


async def test_a_task_that_is_cancelled_cancels_its_transfer(start: Start, engine: TransferEngine) -> None:
    owner = start(wire="tcp")
    region = add(owner, MIB)
    with connect(engine, region) as peer:
        here = bytearray(MIB)
        await peer.read([(here, region["address"], MIB)])
        assert here == random.Random(1).randbytes(MIB)
        transfer = peer.read([(here, region["address"], MIB)] * 4000)
        task = asyncio.ensure_future(transfer.wait_async())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.done


def test_notifications_come_after_the_bytes(start: Start, engine: TransferEngine) -> None:
    owner = start()
    region = add(owner, MIB)
    with connect(engine, region) as peer:
        data = random.Random(3).randbytes(MIB)
        writing = peer.write([(data, region["address"], MIB)])
        peer.notify(b"block 7")
        assert writing.done
        assert owner.ask("notices")["notices"] == [["user", b"block 7".hex()]]
        assert owner.ask("digest", index=region["index"])["digest"] == hashlib.sha256(data).hexdigest()
        with pytest.raises(err.TooLarge):
            peer.notify(bytes((64 << 10) + 1))


def test_names_are_proven(start: Start) -> None:
    owner = start()
    region = add(owner, 64, read="decode-1", write="")
    with (
        TransferEngine("decode-1", token=TOKEN, listen=None) as by_cluster,
        connect(by_cluster, region) as peer,
    ):
        peer.read([(bytearray(64), region["address"], 64)]).wait()
    tenant = tenant_token(parse_token(TOKEN), "decode-1").text
    with TransferEngine(token=tenant, listen=None) as by_tenant, connect(by_tenant, region) as peer:
        assert by_tenant.name == "decode-1"
        peer.read([(bytearray(64), region["address"], 64)]).wait()
    with pytest.raises(err.Unauthenticated):
        TransferEngine("decode-2", token=tenant, listen=None)
    with pytest.raises(err.Unauthenticated):
        TransferEngine(token=tenant)
    stranger = f"mcc1.{secrets.token_hex(32)}"
    with TransferEngine("decode-1", token=stranger, listen=None) as other, pytest.raises(err.Unauthenticated):
        connect(other, region)


def test_hostile_bytes_do_no_harm(start: Start, engine: TransferEngine) -> None:
    owner = start(wire="tcp")
    region = add(owner, 64)
    descriptor = bytes.fromhex(region["descriptor"])
    for at in range(len(descriptor)):
        flipped = bytearray(descriptor)
        flipped[at] ^= 1 << (at % 8)
        with pytest.raises(err.InvalidArgument):
            engine.connect(bytes(flipped))
        with pytest.raises(err.InvalidArgument):
            engine.connect(descriptor[:at])
    rng = random.Random(5)
    for head in (b"", b"MCK1\x01\x19\x00\x00", b"MCK1\x01\x1a\x00\x00", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", owner.hello["port"]), 10.0) as stranger:
            stranger.sendall(head + rng.randbytes(4096))
            stranger.settimeout(10.0)
            while stranger.recv(65_536):
                pass
    with connect(engine, region) as peer:
        peer.read([(bytearray(64), region["address"], 64)]).wait()


def test_a_file_is_a_region(start: Start, engine: TransferEngine, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(random.Random(4).randbytes(100_000))
    with engine.register_file(path, readable_by="owner") as region:
        got = start().ask("read_of", descriptor=engine.describe().hex(), address=region.address, size=100_000)
    assert got["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "empty").touch()
    with pytest.raises(err.InvalidArgument):
        engine.register_file(tmp_path / "empty")


def test_what_is_not_memory_is_refused(engine: TransferEngine) -> None:
    with pytest.raises(err.InvalidArgument, match="read-only"):
        engine.register(b"constant", writable_by="*")
    with pytest.raises(err.InvalidArgument):
        engine.register(memoryview(bytearray(64))[::2])
    with pytest.raises(err.InvalidArgument):
        engine.register(bytearray())
    with engine.register(bytearray(8)) as region:
        with pytest.raises(err.InvalidArgument):
            region.grant("owner", offset=4, size_bytes=5, readable=True)
        with pytest.raises(err.InvalidArgument):
            region.grant("Not A Name", readable=True)
    region.close()
    with pytest.raises(err.NotFound):
        region.grant("owner", readable=True)
    memory = engine.allocate(4096)
    kept = memory.buffer
    memory.close()
    kept[:] = b"y" * 4096  # still mapped for who has it
    with pytest.raises(err.NodeUnavailable):
        engine.connect("127.0.0.1:1", 5.0)


def test_the_program_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "transfer-engine.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(program, "docs/transfer-engine.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == (
        "shm b'hello'\n[Notification(peer='prefill-0', data=b'request 7 is complete')]\n"
    )
