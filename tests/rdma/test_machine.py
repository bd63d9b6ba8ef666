"""The test machine itself: if these fail, nothing that the other RDMA tests say means anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rdma.conftest import cannot_run
from tests.rdma.vm.cpio import Archive
from tests.rdma.vm.machine import DIED, TIMED_OUT, Machine

pytestmark = pytest.mark.timeout(600)
MakeMachine = Callable[..., Machine]


def test_an_exit_code_comes_back(vm: MakeMachine) -> None:
    ended = vm().run("echo hello from $(uname -s); exit 7")
    assert ended.code == 7, ended.output
    assert "hello from Linux" in ended.output


def test_a_machine_that_dies_is_no_success(vm: MakeMachine) -> None:
    ended = vm(net="none").run("echo c >/proc/sysrq-trigger; sleep 600", timeout_s=300)
    assert ended.code == DIED, ended.output


def test_a_command_that_hangs_is_ended(vm: MakeMachine) -> None:
    assert vm(net="none").run("sleep 600", timeout_s=20).code == TIMED_OUT


def test_one_device_moves_bytes(vm: MakeMachine) -> None:
    ended = vm(net="dummy").run(
        "ibv_devices; timeout 20 ib_write_bw -d rxe0 -x 1 -s 65536 -n 20 & sleep 1;"
        " timeout 20 ib_write_bw -d rxe0 -x 1 -s 65536 -n 20 10.9.0.1; wait"
    )
    assert ended.ok and "rxe0" in ended.output, ended.output


def test_a_wire_really_crosses_the_cable(vm: MakeMachine) -> None:
    look = "tx() { cat /sys/class/net/va0/statistics/tx_bytes; }; before=$(tx);"
    move = (
        "timeout 30 ib_write_bw -d rxb0 -x 1 -s 65536 -n 40 & sleep 1;"
        " timeout 30 ib_write_bw -d rxa0 -x 1 -s 65536 -n 40 10.9.0.2 || exit 3; wait;"
    )
    ended = vm(net="wire", rails=2).run(f"{look} {move} echo moved $(($(tx) - before)); rdma link")
    assert ended.ok, ended.output
    moved = int(ended.output.split("moved ")[1].split()[0])
    assert moved > 40 * 65536, ended.output
    assert all(name in ended.output for name in ("rxa0", "rxb0", "rxa1", "rxb1"))


def test_what_cannot_run_is_a_skip_and_a_failure_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOONCACHE_TEST_RDMA_MACHINE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no qemu"):
        cannot_run("no qemu")
    monkeypatch.setenv("MOONCACHE_TEST_RDMA_MACHINE", "required")
    with pytest.raises(pytest.fail.Exception, match="required here, but: no qemu"):
        cannot_run("no qemu")


def test_archive_pads_and_makes_parents() -> None:
    archive = Archive()
    archive.file("a/b/c", b"12345")
    data = archive.finish()
    assert data.index(b"a\0") < data.index(b"a/b\0") < data.index(b"a/b/c\0") < data.index(b"TRAILER!!!\0")
    assert len(data) % 4 == 0 and data.count(b"070701") == 4
