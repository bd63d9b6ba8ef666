"""What `mooncache cost` asks of a master: tenants' bytes and the memory of the nodes, of a real pool."""

from __future__ import annotations

from pathlib import Path

import mooncache
from mooncache.cli.common import Where
from mooncache.cli.cost import Seen, _ask_master
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.prices import example
from tests.conditions import wait_until

SIZE = 1 << 20


def test_storage_is_what_tenants_hold_and_what_nodes_have(tmp_path: Path) -> None:
    settings = ClusterSettings(
        state_dir=tmp_path, nodes=1, capacity_bytes=64 << 20, port=0, log_level="error"
    )
    with EmbeddedCluster(settings) as running:
        with mooncache.connect(**running.client_settings()) as client:
            client.put("key", b"x" * SIZE)
        where = Where(state_dir=tmp_path, timeout="20s")

        def asked() -> Seen | None:
            seen = Seen()
            where.ask_master(lambda link: _ask_master(link, seen, where.timeout_s))
            return seen if any(size.memory_bytes >= SIZE for size in seen.stored.values()) else None

        seen = wait_until(asked, "the node reports its tenants")
        assert seen is not None
        assert seen.capacity is not None
        assert seen.capacity.memory_bytes >= 64 << 20
        assert seen.capacity.disk_bytes == 0
        assert seen.capacity.per_hour(example.price_book()) > 0
