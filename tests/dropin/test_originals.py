"""The original's own Python tests, unchanged, against our package.

They are not part of this repository. Whoever has a checkout of the original runs them with
MOONCACHE_TEST_MOONCAKE=/path/to/Mooncake (and `msgpack` and `safetensors` installed): each file in a process of its
own, on a pool whose memory is what the tests contribute, as on the original's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import stop_all
from tests.client.conftest import make_cluster
from tests.dropin.conftest import COMPAT

CHECKOUT = Path(os.environ.get("MOONCACHE_TEST_MOONCAKE", "/nonexistent"))
TESTS = CHECKOUT / "mooncake-wheel" / "tests"
DIFFER = {
    "test_distributed_object_store.py": {
        # Nothing is staged in a buffer of that size here, so there is no reason to fail.
        "test_zero_local_buffer_size",
    },
    "test_batch_replica_clear.py": {
        # There are no leases: a reader keeps what it reads by a pin, and nothing has to wait.
        "test_clear_with_active_lease",
        "test_clear_mixed_expired_and_active",
    },
    "test_put_get_tensor.py": set(),
    "test_replicated_distributed_object_store.py": set(),
    "test_safetensor_functions.py": set(),
    # The Transfer Engine.
    "test_batch_register_memory.py": set(),
    "test_transfer_engine_gil.py": set(),
    "test_transfer_engine_protocol.py": set(),
}
"""File -> its tests that fail here, with the reason."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("mooncake_store"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not TESTS.is_dir(), reason="MOONCACHE_TEST_MOONCAKE names no checkout of Mooncake"),
]


@pytest.fixture
def empty_pool(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """A master whose only node has left."""
    with make_cluster(tmp_path / "pool", nodes=1, capacity_bytes=4 << 20) as running:
        stop_all([running.parts["node-1"]], 10.0)
        yield running


@pytest.mark.parametrize("name", DIFFER)
def test_a_file_of_the_original(name: str, empty_pool: EmbeddedCluster, tmp_path: Path) -> None:
    outcomes = run(name, f"not ({' or '.join(DIFFER[name]) or 'nothing'})", empty_pool, tmp_path)
    assert outcomes
    assert {test for test, outcome in outcomes.items() if outcome != "PASSED"} == set()


@pytest.mark.parametrize("name", [name for name, tests in DIFFER.items() if tests])
def test_what_differs_still_differs(name: str, empty_pool: EmbeddedCluster, tmp_path: Path) -> None:
    outcomes = run(name, " or ".join(DIFFER[name]), empty_pool, tmp_path)
    assert outcomes == dict.fromkeys(DIFFER[name], "FAILED")


def run(name: str, chosen: str, empty_pool: EmbeddedCluster, tmp_path: Path) -> dict[str, str]:
    """Test -> outcome, of the tests of a file that pytest's -k chooses."""
    paths = os.pathsep.join([str(COMPAT), *(path for path in sys.path if path)])
    env = {
        **os.environ,
        "MOONCACHE_CLUSTER_STATE_DIR": str(empty_pool.state_dir),
        "MASTER_SERVER": empty_pool.master_target,
        "DEFAULT_KV_LEASE_TTL": "1",  # there are no leases to wait for
        "PYTHONPATH": paths,
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-rA",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            chosen,
            str(TESTS / name),
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    found = re.findall(r"^(FAILED|ERROR|PASSED) \S*::(\w+)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {test: outcome for outcome, test in found}
