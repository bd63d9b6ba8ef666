"""`mooncache upgrade`: a running cluster goes to another version and back, process by process, under load.

The other version is this code under another number, in an environment of its own, or the older build that
MOONCACHE_TEST_UPGRADE_FROM names: a wheel, or a revision (see `mooncache.bench.other_version`). Every answer is
compared with that of an empty cache, and every block is read all the time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mooncache._version import __version__
from mooncache.bench.other_version import UPGRADE_FROM, make_other_version
from mooncache.bench.survival.upgrade import supervised, there_and_back, upgrade_with
from mooncache.cluster.processes import processes_of_run
from mooncache.cluster.settings import missing_modules
from tests.hf_engine.conftest import model_folder

__all__ = ["model_folder"]  # a fixture

pytestmark = [
    pytest.mark.timeout(4500 if os.environ.get(UPGRADE_FROM) else 900),  # a revision is built first
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]
FORWARD = ["master", "node-1", "node-2", "decode-1", "decode-2", "conductor", "gateway"]
BLOCKS = 200


def adopted(log: str) -> list[bool]:
    """Of each start of a node that adopted memory: whether all watched blocks were in it."""
    rows = [json.loads(line) for line in log.splitlines() if '"node.memory_adopted"' in line]
    return [row["blocks"] >= BLOCKS and row["refused"] == 0 for row in rows]


def test_every_process_there_and_back_under_load(tmp_path: Path, model_folder: Path) -> None:
    other = make_other_version(tmp_path / "other")
    with supervised(tmp_path / "state", model_folder, prefill=0) as cluster:
        checked = upgrade_with(other.python, cluster.state_dir, "--check")
        first = {name: part.pid for name, part in cluster.parts.items()}
        seen = there_and_back(cluster, other, 3, print)
        pids = {name: part.pid for name, part in cluster.parts.items()}
        logs = [cluster.parts[name].log_path.read_text(encoding="utf-8") for name in ("node-1", "node-2")]
    assert not processes_of_run(cluster.run_id)
    assert [row for row in checked["findings"] if row["grade"] != "ok"] == []
    there, back = (FORWARD[::-1], FORWARD) if other.older else (FORWARD, FORWARD[::-1])
    assert (checked["order"], checked["rolled"]) == (there, [])
    assert {row["version"] for row in checked["processes"]} == {__version__}
    for way, order in ((seen.there, there), (seen.back, back)):
        assert [row["name"] for row in way["rolled"]] == order
        assert {row["version"] for row in way["rolled"]} == {way["version"]}
    assert {row["version"] for row in seen.back["processes"]} == {seen.there["version"]}, "all of them had it"
    assert all(pids[name] != first[name] for name in FORWARD)
    assert seen.failed == [], "every request is answered, with the tokens of an empty cache"
    assert seen.wrong_reads == [] and seen.reads > BLOCKS, "every block can be read at every moment"
    assert seen.lost_blocks == []
    assert [adopted(log) for log in logs] == [[True, True]] * 2, "each way each node took over what there was"
    assert seen.hit_ratio_before > 0
    assert seen.hit_ratio_after >= 0.99 * seen.hit_ratio_before
