"""A host with a gateway, an engine and a store node is gone at once, under load through the gateway of another host."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.bench.survival.host import lose_host, two_hosts
from mooncache.cluster.settings import missing_modules
from tests.hf_engine.conftest import model_folder

__all__ = ["model_folder"]  # a fixture

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]


def test_only_streams_on_a_lost_host_break_off(model_folder: Path, tmp_path: Path) -> None:
    with two_hosts(tmp_path, model_folder) as cluster:
        engines = {row["instance_id"]: row["engine_pid"] for row in cluster.describe_instances()}
        seen = lose_host(cluster, 16, lambda _: None)
        left = {row["instance_id"]: row["engine_pid"] for row in cluster.describe_instances()}
        assert left["decode-1"] == engines["decode-1"], "the other engine has run all the time"
    assert not seen.failed_elsewhere, "streams elsewhere, and requests that had not begun, are served"
    assert seen.served >= 32 - len(seen.broken)
    assert seen.broken, "at least the stream through the lost gateway ended"
    assert not seen.late, "each with an error or a closed connection, not by its time limit"
    assert not seen.wrong, "what came before the end was right"
    assert not seen.copies_missing and not seen.other_reads_failed
    assert seen.misses, "what only the lost node had is a miss"
    assert not seen.other_bytes
