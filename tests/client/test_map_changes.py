"""The map changes under calls: a new master gives its nodes other indices, and no call notices."""

from __future__ import annotations

import threading

from mooncache.client.engine import ClientCore
from mooncache.client.options import ClientOptions, new_native
from mooncache.client.results import ClusterView, NodeView
from tests.client.test_native_nodes import TOKEN, servers

CHANGES = 400


def test_no_get_fails_while_nodes_get_other_indices() -> None:
    """A restarted master hears of the nodes in another order; each map then has the same nodes under new indices."""
    options = ClientOptions.gather(nodes=["127.0.0.1:1"], token=TOKEN, shm=False)
    with servers(2) as running:
        engine = ClientCore(new_native(options), default_timeout_s=20.0, locate=None)
        ports = [server.endpoints()["tcp_port"] for server in running]

        def apply(version: int) -> None:
            nodes = tuple(
                NodeView(2 * version + i, f"n{i}", f"h{i}", i + 1, "active", "127.0.0.1", ports[i], "")
                for i in range(2)
            )
            engine.apply_view(ClusterView(epoch=version, term=1, nodes=nodes))

        apply(1)
        keys = [f"block-{number}" for number in range(16)]
        engine.put_many(keys, [b"data"] * len(keys), 1, None).raise_for_errors()
        halt = threading.Event()
        wrong: list[object] = []

        def read() -> None:
            while not halt.is_set():
                try:
                    got = engine.get_many(keys, None)
                    engine.exists_many(keys, None)
                except Exception as error:
                    wrong.append(error)
                else:
                    wrong.extend(code for code in got.codes if code)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for version in range(2, CHANGES):
            apply(version)
            halt.wait(0.0005)
        halt.set()
        for reader in readers:
            reader.join()
        assert not wrong, f"{len(wrong)} answers, of them {wrong[:3]}"
        engine.close()
