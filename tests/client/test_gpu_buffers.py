"""GPU memory as source and destination, over a fake CUDA driver; the parts that need a real GPU are in
tests/gpu. Device addresses of the fake driver cannot be read by the processor: a slip is a crash."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import mooncache
from mooncache import _native
from mooncache.bench.transfer.node import start_server
from mooncache.client import device, staging
from mooncache.client.buffers import to_part
from mooncache.errors import BackPressure, DeadlineExceeded, InvalidArgument, NoSpace, TransportUnavailable
from tests.conditions import wait_until
from tests.gpu.fake_gpu import FakeGpu


@pytest.fixture(params=[True, False], ids=["kernel", "copies"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    made = FakeGpu(kernel=request.param)
    monkeypatch.setattr(staging, "open_device", lambda _ordinal: made.device)
    monkeypatch.setattr(staging, "SLOT_BYTES", 100_000)
    monkeypatch.setattr(staging, "GRACE_S", 0.05)
    yield made
    made.restore()
    deadline_s = time.monotonic() + 10
    while staging.UNFINISHED_COPIES.size_bytes():
        assert time.monotonic() < deadline_s, "the device is through and a buffer is kept"


@pytest.fixture
def client() -> Iterator[mooncache.Client]:
    secret = os.urandom(32)
    server = start_server("127.0.0.1", 0, "", secret, 64 << 20)
    address = f"127.0.0.1:{server.endpoints()['tcp_port']}"
    with mooncache.connect(nodes=[address], token=f"mcc1.{secret.hex()}") as made:
        yield made
    server.stop(1.0)


def keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def test_blocks_go_out_of_and_into_the_gpu(fake: FakeGpu, client: mooncache.Client) -> None:
    contents = [
        random.Random(i).randbytes(size) for i, size in enumerate((1, 40_000, 90_000, 150_000, 70_000, 5))
    ]
    names = keys(len(contents))
    client.put_many(names, [fake.array(content) for content in contents]).raise_for_errors()
    assert list(client.get_many(names).values) == contents
    targets = [fake.array(bytes(len(content))) for content in contents]
    client.get_many_into(names, targets).raise_for_errors()
    assert [target.read() for target in targets] == contents


def test_slices_of_both_kinds_make_one_block(fake: FakeGpu, client: mooncache.Client) -> None:
    (name,) = keys(1)
    client.put_many([name], [[fake.array(b"abc"), b"defg", fake.array(b"hi")]]).raise_for_errors()
    assert client.get(name) == b"abcdefghi"
    first, middle, last = fake.array(b"...."), bytearray(3), fake.array(b"....")
    assert client.get_many_into([name], [[first, middle, last]]).hits == 1
    assert (first.read(), bytes(middle), last.read()) == (b"abcd", b"efg", b"hi..")


def test_what_did_not_come_leaves_device_memory_alone(fake: FakeGpu, client: mooncache.Client) -> None:
    names = keys(3)
    client.put(names[1], b"there")
    targets = [fake.array(b"xxxxxxxx") for _ in names]
    result = client.get_many_into(names, targets)
    assert result.hits == 1
    assert [target.read() for target in targets] == [b"xxxxxxxx", b"therexxx", b"xxxxxxxx"]


def test_failing_copies_are_errors_and_the_next_call_works(fake: FakeGpu, client: mooncache.Client) -> None:
    names = keys(4)
    content = b"y" * 60_000
    sources = [fake.array(content) for _ in names]
    for name, code, error in (
        ("cuMemcpyDtoHAsync", 700, TransportUnavailable),
        ("cuStreamQuery", 700, TransportUnavailable),
        ("cuCtxSynchronize", 2, NoSpace),
    ):
        for after in (0, 1):
            if name == "cuCtxSynchronize" and after:
                continue
            fake.fail(name, code, after)
            with pytest.raises(error, match=f"\\({code}\\)"):
                client.put_many(names, sources)
    fake.fail("", 0)
    client.put_many(names, sources).raise_for_errors()
    assert client.get(names[3]) == content


@pytest.mark.parametrize("gets", [False, True])
def test_blocks_behind_the_deadline_have_its_code_and_the_others_their_own(fake: FakeGpu, gets: bool) -> None:
    arrays = [to_part(fake.array(b"y" * 60_000), writable=True) for _ in range(3)]
    moving = device.DeviceStaging()

    def slow(begin: int, end: int, _parts: Any, limit_s: float) -> list[tuple[int, ...]]:
        time.sleep(limit_s)
        return [(0, 60_000, 7) if gets else (0, 7, True)] * (end - begin)

    answers = moving.get(arrays, 0.2, slow) if gets else moving.put(arrays, 0.2, slow)
    assert [item[0] for item in answers] == [0, DeadlineExceeded.code, DeadlineExceeded.code]
    assert [item[2 if gets else 1] for item in answers] == [7, None, None], "the node that has it"


def test_what_cannot_be_taken_is_told(fake: FakeGpu, client: mooncache.Client) -> None:
    (name,) = keys(1)
    with pytest.raises(InvalidArgument, match="read-only"):
        client.get_many_into([name], [fake.array(b"abcd", data=(1 << 62, True))])
    with pytest.raises(InvalidArgument, match="not contiguous"):
        client.put_many([name], [fake.array(b"abcd", shape=(2,), strides=(2,))])
    with pytest.raises(InvalidArgument, match="address 0"):
        client.put_many([name], [fake.array(b"abcd", data=(0, False))])
    with pytest.raises(InvalidArgument, match="malformed"):
        client.put_many([name], [fake.array(b"abcd", typestr=None)])
    other = fake.array(b"abcd")
    other.device = type("Device", (), {"index": 1})()  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match="one GPU"):
        client.put_many(keys(2), [fake.array(b"abcd"), other])
    with pytest.raises(InvalidArgument, match="at least one byte"):
        client.put_many([name], [fake.array(b"")])


def test_who_cannot_say_where_it_is_is_refused_by_name() -> None:
    """torch raises for its tensors on \"meta\", each kind with errors of its own."""

    class Nowhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise ValueError("Unknown device type meta for Dlpack")

        def __dlpack__(self) -> object:
            raise BufferError("no storage")

    with pytest.raises(InvalidArgument, match="Nowhere"):
        to_part(Nowhere(), writable=False)


def test_without_a_driver_the_reason_is_told() -> None:
    with pytest.raises(RuntimeError, match="CUDA unavailable, because"):
        _native.GpuDevice(0, "libcuda-that-is-not-there.so", "")


@pytest.mark.parametrize("gets", [False, True])
def test_a_gpu_that_hangs_ends_the_call_and_keeps_what_it_may_touch(
    fake: FakeGpu, client: mooncache.Client, monkeypatch: pytest.MonkeyPatch, gets: bool
) -> None:
    names = keys(2)
    arrays = [fake.array(bytes([value]) * 60_000) for value in (1, 2)]
    client.put_many(names, arrays).raise_for_errors()
    quick = SimpleNamespace(
        synchronize=lambda _limit_s: None, make_stager=fake.device.make_stager, name="GPU"
    )
    monkeypatch.setattr(staging.Stagers, "device", lambda *_: quick)  # it hangs only afterwards
    fake.hang(True)
    begun_s = time.monotonic()
    move, named = (client.get_many_into, names) if gets else (client.put_many, keys(2))
    with pytest.raises(DeadlineExceeded, match="did not end the copies"):
        move(named, arrays, timeout_s=0.1)
    assert time.monotonic() - begun_s < 5
    assert staging.UNFINISHED_COPIES.size_bytes() == 200_000
    with pytest.raises(DeadlineExceeded):
        client.put_many(keys(2), arrays, timeout_s=0.1)  # with buffers of its own
    assert staging.UNFINISHED_COPIES.size_bytes() == 400_000
    monkeypatch.setattr(staging, "KEPT_BYTES_MAX", 300_000)
    with pytest.raises(BackPressure, match="400000 bytes"):
        client.put_many(keys(2), arrays, timeout_s=0.1)
    fake.hang(False)
    wait_until(lambda: not staging.UNFINISHED_COPIES.size_bytes(), "the buffers are free", every_s=0.001)
    assert client.get_many_into(names, arrays).hits == 2
    assert [array.read()[:2] for array in arrays] == [b"\x01\x01", b"\x02\x02"]


def test_work_of_others_is_waited_for_no_longer_than_the_limit(
    fake: FakeGpu, client: mooncache.Client
) -> None:
    (name,) = keys(1)
    fake.hang(True)
    with pytest.raises(DeadlineExceeded, match="not through with its work"):
        client.put_many([name], [fake.array(b"abc")], timeout_s=0.05)
    fake.hang(False)
    client.put_many([name], [fake.array(b"abc")]).raise_for_errors()
    assert client.get(name) == b"abc"
