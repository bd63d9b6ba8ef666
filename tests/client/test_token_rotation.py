"""The cluster token is changed process by process: what does not know the new one is refused, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

import mooncache
from mooncache.auth import create_cluster_token
from mooncache.errors import MooncacheError, Unauthenticated
from tests.client.conftest import make_cluster
from tests.conditions import WAIT_S, wait_until

pytestmark = pytest.mark.slow
REFUSED = {"UNAUTHENTICATED", "UNKNOWN_NODE"}
"""What the holder of the other token hears: the node refuses it; or the map is without the node, whose master does."""


def outcome(pool: mooncache.Client) -> str:
    """The name of the code with which a node answers, "" when it serves."""
    try:
        pool.ping(0)
    except MooncacheError as error:
        return error.name
    return ""


def test_a_token_that_is_changed_process_by_process(tmp_path: Path) -> None:
    cluster = make_cluster(
        tmp_path,
        nodes=1,
        MOONCACHE_STORE_NODE_KEEP_MEMORY="true",
        MOONCACHE_STORE_NODE_CAPACITY_BYTES="64MiB",
    )
    cluster.start()
    old_token = cluster.token_path.read_text().strip()
    settings = {name: value for name, value in cluster.client_settings().items() if name != "token_file"}
    try:
        with mooncache.connect(**settings, token=old_token, timeout_s=30, shm=False) as pool:
            assert pool.put("before", b"value")
            cluster.token_path.unlink()
            new_token = create_cluster_token(cluster.token_path).text
            cluster.kill("node-1")
            cluster.restart("node-1")
            wait_until(lambda: outcome(pool) in REFUSED, lambda: outcome(pool))
            with pytest.raises(Unauthenticated):  # the master still has the old token
                mooncache.connect(**settings, token=new_token, connect_timeout_s=WAIT_S)
            cluster.kill("master")
            cluster.restart("master")
            cluster.wait_ready(60)
            with pytest.raises(Unauthenticated):
                mooncache.connect(**settings, token=old_token, connect_timeout_s=WAIT_S)
            with mooncache.connect(**settings, token=new_token, timeout_s=30, shm=False) as fresh:
                wait_until(lambda: outcome(fresh) == "", lambda: outcome(fresh))
                assert fresh.get("before") == b"value", "tokens are no part of blocks or of their keys"
            assert outcome(pool) in REFUSED, "the old one is of no use any more"
    finally:
        cluster.stop()
