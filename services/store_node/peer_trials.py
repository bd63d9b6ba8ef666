"""The one peer that this node is to try, and what came of the last try: handed over between two duties."""

from __future__ import annotations

import asyncio

from mooncache.proto.v1 import common_pb2, master_pb2


class PeerTrials:
    """Room for one wish and one result. What is not taken in time is replaced: the master asks again."""

    def __init__(self) -> None:
        self._wish: common_pb2.NodeInfo | None = None
        self._result: master_pb2.PeerTrial | None = None
        self._wished = asyncio.Event()

    def wish(self, peer: common_pb2.NodeInfo) -> None:
        """The master wants to know how far this node is."""
        self._wish = peer
        self._wished.set()

    async def next(self) -> common_pb2.NodeInfo:
        """The next node to try."""
        while True:
            await self._wished.wait()
            self._wished.clear()
            if self._wish is not None:
                wish, self._wish = self._wish, None
                return wish

    def keep(self, peer: str, took_s: float) -> None:
        """A try has ended; `took_s` 0: it failed."""
        took_us = max(1, round(took_s * 1e6)) if took_s > 0 else 0
        self._result = master_pb2.PeerTrial(node_id=peer, round_trip_us=min(took_us, (1 << 32) - 1))

    def take(self) -> master_pb2.PeerTrial | None:
        """What came of the last try, once."""
        result, self._result = self._result, None
        return result
