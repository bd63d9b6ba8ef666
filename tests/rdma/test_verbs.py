"""The native transport and client suites on real verbs, in the test machine: what they pass on the fake
library they must pass on a kernel driver and a libibverbs that we did not write.

The suites are those of `make native-test` (build/release, or MOONCACHE_TEST_NATIVE_BUILD); without them,
skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rdma.conftest import cannot_run
from tests.rdma.vm.machine import Ended, Machine

pytestmark = pytest.mark.timeout(900)
MakeMachine = Callable[..., Machine]
ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MOONCACHE_TEST_NATIVE_BUILD", ROOT / "build" / "release"))
PATIENCE_S = 400.0  # the processors are emulated, and the machine under them may be busy

ON_THE_WIRE = "MOONCACHE_TEST_RDMA_CLIENT=rxa0,rxa1 MOONCACHE_TEST_RDMA_NODE=rxb0,rxb1"
# Fails when no byte left by the named rail.
CROSSED = 'for rail in {rails}; do test "$(cat /sys/class/net/$rail/statistics/tx_bytes)" -gt {bytes} || exit 55; done'

# What the driver counts when packets are missing, and sent again.
COUNTERS = """
for name in completer_retry_err duplicate_request out_of_seq_request rcvd_seq_err; do
  for file in /sys/class/infiniband/*/ports/1/hw_counters/$name; do echo "repeated: $(cat $file) $file"; done
done
"""


def suite(machine: Machine, name: str, chosen: str, settings: str = "", after: str = "true") -> Ended:
    binary = BUILD / name
    if not binary.exists():
        cannot_run(f"{binary} is not built (make native-test)")
    machine.folders = [BUILD]
    command = f"{binary} --gtest_color=no --gtest_filter='{chosen}'"
    run = f"MOONCACHE_TEST_RDMA=real {settings} timeout {PATIENCE_S:.0f} {command}"
    return machine.run(f"{run} || exit 1\n{after}", timeout_s=PATIENCE_S)


def passed(ended: Ended) -> int:
    assert ended.ok, ended.output[-6000:]
    found = re.search(r"\[ +PASSED +\] (\d+) test", ended.output)
    assert found is not None and "SKIPPED" not in ended.output, ended.output[-3000:]
    return int(found[1])


def test_conformance_on_one_device(vm: MakeMachine) -> None:
    assert passed(suite(vm(net="dummy"), "test_transport", "*Conformance*/rdma")) >= 16


def test_conformance_over_a_wire_with_two_rails(vm: MakeMachine) -> None:
    crossed = CROSSED.format(rails="va0 va1", bytes=1_000_000)
    ended = suite(vm(net="wire", rails=2), "test_transport", "*Conformance*/rdma", ON_THE_WIRE, crossed)
    assert passed(ended) >= 16


def test_a_pool_moves_blocks_over_two_rails(vm: MakeMachine) -> None:
    chosen = "RdmaPool.BlocksGoAndComeOverRdma:RdmaPool.ANodeThatIsGone*:RdmaPool.SmallBlocks*:RdmaPool.ManyThreads"
    crossed = CROSSED.format(rails="va0 va1 vb0 vb1", bytes=2_000_000)
    assert passed(suite(vm(net="wire", rails=2), "test_client", chosen, ON_THE_WIRE, crossed)) == 4


def test_devices_use_registered_and_lent_memory_in_place(vm: MakeMachine) -> None:
    """Real registrations pin pages: what was mapped anew at an address would show the old bytes. And what was cancelled
    leaves the memory alone, although no device is told to let go of single requests.
    """
    lent = ("BlocksOf*", "SmallBlocks*", "Registered*", "MemoryMapped*", "MoreBuffers*", "ACancelledGet*")
    scattered = ("BlocksGo*", "ATensorThat*", "Layers*")
    book = "Book.*:-Book.WhatCannotBeAttached*"
    chosen = ":".join(
        (*(f"Lending.{name}" for name in lent), *(f"Scattered.{name}" for name in scattered), book)
    )
    assert passed(suite(vm(net="wire", rails=2), "test_client", chosen, ON_THE_WIRE)) == 16


def test_a_layer_of_many_blocks_is_written_in_one_call(vm: MakeMachine) -> None:
    """Reservations of many blocks (decision 0021), by their writer's device."""
    chosen = "RdmaReservations.RangesGo*:RdmaReservations.ALayerOf*:RdmaReservations.ARegistered*"
    crossed = CROSSED.format(rails="va0 va1", bytes=1_000_000)
    assert passed(suite(vm(net="wire", rails=2), "test_client", chosen, ON_THE_WIRE, crossed)) == 3


def test_packet_loss_costs_time_and_no_byte(vm: MakeMachine) -> None:
    machine = vm(net="wire", rails=2, loss_percent=1.0)
    ended = suite(machine, "test_client", "RdmaPool.FortyBlocks*", ON_THE_WIRE, COUNTERS)
    assert passed(ended) == 1
    repeated = sum(
        int(line.split()[1]) for line in ended.output.splitlines() if line.startswith("repeated: ")
    )
    assert repeated > 0, ended.output[-3000:]
