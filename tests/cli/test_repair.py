"""What `mooncache repair status` says of the blocks that move to emptier nodes."""

from __future__ import annotations

import pytest

from mooncache.cli.repair import repair_document, repair_lines
from mooncache.proto.v1 import master_pb2

MIB = 1 << 20
FILLS = {"fullest_percent": 60, "emptiest_percent": 10}


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            master_pb2.RebalanceStatus(state=master_pb2.REBALANCE_STATE_AT_REST, **FILLS),
            "rebalance at rest: nodes are 10 to 60 % full",
        ),
        (
            master_pb2.RebalanceStatus(state=master_pb2.REBALANCE_STATE_WAITING, wait_ms=12_000, **FILLS),
            "rebalance waits 12.0s: a node came or went; nodes are 10 to 60 % full",
        ),
        (
            master_pb2.RebalanceStatus(state=master_pb2.REBALANCE_STATE_WAITING, **FILLS),
            "rebalance waits for a repair or a task: a node came or went; nodes are 10 to 60 % full",
        ),
        (
            master_pb2.RebalanceStatus(
                state=master_pb2.REBALANCE_STATE_MOVING,
                left_bytes=120 * MIB,
                bytes_per_s=40 * MIB,
                limit_bytes_per_s=64 * MIB,
                estimate_ms=3000,
                moved_bytes=80 * MIB,
                moved_block_count=20,
                skipped_block_count=2,
                **FILLS,
            ),
            "rebalance 120.0 MiB left, 40.0 MiB/s of 64.0 MiB/s, about 3.0s; nodes are 10 to 60 % full",
        ),
        (
            master_pb2.RebalanceStatus(state=master_pb2.REBALANCE_STATE_OFF),
            "rebalance off: the limit is 0",
        ),
        (master_pb2.RebalanceStatus(), "rebalance not known: the master is of a former version"),
    ],
)
def test_what_moves_is_said_below_the_repair(found: master_pb2.RebalanceStatus, line: str) -> None:
    document = repair_document(
        master_pb2.GetRepairResponse(state=master_pb2.REPAIR_STATE_WHOLE, spread_over="rack", rebalance=found)
    )
    lines = repair_lines(document)
    assert lines[0] == "repair    every block has its copies"
    assert line in lines
    if found.moved_block_count:
        assert lines[-1].strip() == "since this master leads: 20 blocks moved (80.0 MiB), 2 could not move"
