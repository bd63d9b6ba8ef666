"""The native transport and client suites on real verbs, in the test machine: what they pass on the fake
library they must pass on a kernel driver and a libibverbs that we did not write.

The suites are those of `make native-test` (build/release, or MOONCACHE_TEST_NATIVE_BUILD); without them,
skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rdma.conftest import cannot_run
from tests.rdma.vm.machine import DIED, Ended, Machine

pytestmark = pytest.mark.timeout(900)
MakeMachine = Callable[..., Machine]
ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MOONCACHE_TEST_NATIVE_BUILD", ROOT / "build" / "release"))
PATIENCE_S = 400.0  # the processors are emulated, and the machine under them may be busy

ON_THE_WIRE = "MOONCACHE_TEST_RDMA_CLIENT=rxa0,rxa1 MOONCACHE_TEST_RDMA_NODE=rxb0,rxb1"
RAILS = ("va0", "va1", "vb0", "vb1")
MOVED = f'for rail in {" ".join(RAILS)}; do echo "moved $rail $(cat /sys/class/net/$rail/statistics/tx_bytes)"; done'
LENT = ("BlocksOf*", "SmallBlocks*", "Registered*", "MemoryMapped*", "MoreBuffers*", "ACancelledGet*")
SCATTERED = ("BlocksGo*", "ATensorThat*", "Layers*")
IN_PLACE = (*(f"Lending.{name}" for name in LENT), *(f"Scattered.{name}" for name in SCATTERED), "Book.*")
# One machine runs them one after the other, because starting it costs as much as a suite.
ON_A_WIRE = {
    "conformance": ("test_transport", "*Conformance*/rdma"),
    "pool": (
        "test_client",
        "RdmaPool.BlocksGoAndComeOverRdma:RdmaPool.ANodeThatIsGone*:RdmaPool.SmallBlocks*:RdmaPool.ManyThreads",
    ),
    "in place": ("test_client", f"{':'.join(IN_PLACE)}:-Book.WhatCannotBeAttached*"),
    "layer": (
        "test_client",
        "RdmaReservations.RangesGo*:RdmaReservations.ALayerOf*:RdmaReservations.ARegistered*",
    ),
}

# What the driver counts when packets are missing, and sent again.
COUNTERS = """
for name in completer_retry_err duplicate_request out_of_seq_request rcvd_seq_err; do
  for file in /sys/class/infiniband/*/ports/1/hw_counters/$name; do echo "repeated: $(cat $file) $file"; done
done
"""


@dataclass(frozen=True)
class Suite:
    """How one suite ended, and the bytes that left by each rail meanwhile."""

    ended: Ended
    moved: dict[str, int]


def command(name: str, chosen: str, settings: str = "") -> str:
    binary = BUILD / name
    if not binary.exists():
        cannot_run(f"{binary} is not built (make native-test)")
    run = f"{binary} --gtest_color=no --gtest_filter='{chosen}'"
    return f"MOONCACHE_TEST_RDMA=real {settings} timeout {PATIENCE_S:.0f} {run}"


@pytest.fixture(scope="module")
def on_a_wire(vm: MakeMachine) -> dict[str, Suite]:
    """The suites on two rails."""
    lines = []
    for name, (binary, chosen) in ON_A_WIRE.items():
        lines += [f"echo '== {name}'", MOVED, command(binary, chosen, ON_THE_WIRE), 'echo "code $?"', MOVED]
    machine = vm(net="wire", rails=2, folders=[BUILD])
    output = machine.run("\n".join(lines), timeout_s=2 * PATIENCE_S).output
    found = {}
    for part in output.split("== ")[1:]:
        name, _, text = part.partition("\n")
        code = re.search(r"^code (\d+)$", text, re.MULTILINE)
        counts = re.findall(r"^moved (\w+) (\d+)$", text, re.MULTILINE)
        first = {rail: int(count) for rail, count in reversed(counts)}
        last = {rail: int(count) for rail, count in counts}
        ended = Ended(int(code[1]) if code else DIED, text)
        found[name] = Suite(ended, {rail: last[rail] - first[rail] for rail in last})
    assert set(found) == set(ON_A_WIRE), output[-6000:]
    return found


def passed(ended: Ended) -> int:
    assert ended.ok, ended.output[-6000:]
    found = re.search(r"\[ +PASSED +\] (\d+) test", ended.output)
    assert found is not None and "SKIPPED" not in ended.output, ended.output[-3000:]
    return int(found[1])


def test_conformance_on_one_device(vm: MakeMachine) -> None:
    machine = vm(net="dummy", folders=[BUILD])
    ended = machine.run(command(*ON_A_WIRE["conformance"]), timeout_s=PATIENCE_S)
    assert passed(ended) >= 16


def test_conformance_over_a_wire_with_two_rails(on_a_wire: dict[str, Suite]) -> None:
    suite = on_a_wire["conformance"]
    assert passed(suite.ended) >= 16
    assert min(suite.moved["va0"], suite.moved["va1"]) > 1_000_000


def test_a_pool_moves_blocks_over_two_rails(on_a_wire: dict[str, Suite]) -> None:
    suite = on_a_wire["pool"]
    assert passed(suite.ended) == 4
    assert min(suite.moved[rail] for rail in RAILS) > 2_000_000


def test_devices_use_registered_and_lent_memory_in_place(on_a_wire: dict[str, Suite]) -> None:
    """Real registrations pin pages: what was mapped anew at an address would show the old bytes. And what was cancelled
    leaves the memory alone, although no device is told to let go of single requests.
    """
    assert passed(on_a_wire["in place"].ended) == 16


def test_a_layer_of_many_blocks_is_written_in_one_call(on_a_wire: dict[str, Suite]) -> None:
    """Reservations of many blocks (decision 0021), by their writer's device."""
    suite = on_a_wire["layer"]
    assert passed(suite.ended) == 3
    assert min(suite.moved["va0"], suite.moved["va1"]) > 1_000_000


def test_packet_loss_costs_time_and_no_byte(vm: MakeMachine) -> None:
    machine = vm(net="wire", rails=2, loss_percent=1.0, folders=[BUILD])
    run = command("test_client", "RdmaPool.FortyBlocks*", ON_THE_WIRE)
    ended = machine.run(f"{run} || exit 1\n{COUNTERS}", timeout_s=PATIENCE_S)
    assert passed(ended) == 1
    repeated = sum(
        int(line.split()[1]) for line in ended.output.splitlines() if line.startswith("repeated: ")
    )
    assert repeated > 0, ended.output[-3000:]
