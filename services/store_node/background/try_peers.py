"""Duty: try the peers that the master names, one at a time, over the data port as copies go.

What it took goes out with the next heartbeat. A connection of its own is opened for each try, so neither breakers nor
kept connections decide, and the shortest of a few round trips is taken: the rest is this machine's scheduler.
"""

from __future__ import annotations

from typing import Final

from mooncache.errors import MooncacheError
from mooncache.store_node.peer_trials import PeerTrials
from mooncache.store_node.surroundings import Surroundings

TIMEOUT_S: Final = 2.0


async def run(trials: PeerTrials, surroundings: Surroundings) -> None:
    """Until cancelled."""
    while True:
        peer = await trials.next()
        try:
            took_s = await surroundings.round_trip(peer, TIMEOUT_S)
        except MooncacheError:
            took_s = 0.0
        trials.keep(peer.node_id, took_s)
