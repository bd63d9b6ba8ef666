"""A small node behind the real client hits what the simulator says: chains are matched, what is missing is put.

The first 512 chains are ordered by their age alone, so the node's clock does not matter.
"""

from __future__ import annotations

import random
import struct

import pytest

import mooncache
from mooncache import _native
from mooncache.auth import Token
from mooncache.simulate.cache import make
from mooncache.traces import generate
from mooncache.traces.generator import conversation
from tests.reuse_prediction import predicted_hits

SECRET = bytes(range(32))
TOKEN = Token("default", admin=True, key=SECRET).text
BLOCK_BYTES = 512
CAPACITY_BLOCKS = 600


def predicted(policy: str, chains: list[list[int]]) -> list[int]:
    if policy == "lru":
        cache, hits = make("lru", CAPACITY_BLOCKS), []
        for number, chain in enumerate(chains):
            hits.append(cache.leading(chain, number))
            cache.use(chain, number)
        return hits
    return predicted_hits(chains, range(len(chains)), CAPACITY_BLOCKS)


@pytest.mark.parametrize("policy", ["lru", "mooncache"])
def test_a_node_hits_what_the_simulator_says(policy: str) -> None:
    trace = generate(conversation(requests=400), random.Random(17))
    chains = [trace.blocks(request) for request in range(len(trace))]
    server = _native.StoreServer(
        {
            "node_id": "n0",
            "secret": SECRET,
            "incarnation": 1,
            "capacity_bytes": CAPACITY_BLOCKS * BLOCK_BYTES,
            "quantum_bytes": BLOCK_BYTES,
            "expected_block_bytes": BLOCK_BYTES,
            "shards": 1,
            "io_threads": 1,
            "huge_pages": False,
            "eviction": policy,
        }
    )
    server.start()
    try:
        port, hits = server.endpoints()["tcp_port"], []
        with mooncache.connect(nodes=[f"n0@127.0.0.1:{port}"], token=TOKEN, shm=False) as pool:
            for chain in chains:
                keys = [struct.pack("<Q24x", block) for block in chain]
                match = pool.match(keys)
                hits.append(match.leading_blocks)
                missing = [key for key, present in zip(keys, match.present, strict=True) if not present]
                if missing:
                    pool.put_many(missing, [bytes(BLOCK_BYTES)] * len(missing)).raise_for_errors()
        assert server.stats()["store_removed_evicted"] > 1_000
        assert server.check() == ""
    finally:
        server.stop(1.0)
    assert hits == predicted(policy, chains)
