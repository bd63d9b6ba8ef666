"""What a store that evicts by learnt reuse should hit: the simulator's policy, moved as a store moves it."""

from __future__ import annotations

from collections.abc import Sequence

from mooncache.simulate.cache.reuse import Reuse


def predicted_hits(
    chains: Sequence[Sequence[int]], times_s: Sequence[float], capacity_blocks: int
) -> list[int]:
    """Leading blocks found of each chain, when each is asked for and then what is missing is put."""
    policy, stored, hits = Reuse(capacity_blocks), set[int](), []
    for chain, now_s in zip(chains, times_s, strict=True):
        missing = [block for block in chain if block not in stored]
        hits.append(next((at for at, block in enumerate(chain) if block not in stored), len(chain)))
        policy.seen(chain, now_s, here=stored)
        for block in missing:
            while len(stored) >= capacity_blocks:
                victim = policy.victim(now_s, block)
                assert victim is not None
                policy.discard(victim.block)
                stored.remove(victim.block)
            policy.stored(block, now_s)
            stored.add(block)
    return hits
