"""What a run needs of a cluster, however it was started: its processes, whether all is well, how it is asked."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Protocol

from mooncache.auth import Token
from mooncache.chaos.core.faults import Aim
from mooncache.chaos.core.records import PoolTally


class PoolWork(Protocol):
    """A client of the pool alone that puts and reads between `start` and `end`."""

    def start(self) -> None:
        """Begin. Raises MooncacheError when it cannot."""

    def end(self) -> None:
        """Stop, and have everything in the tally."""


class ChaosTarget(Protocol):
    """A cluster whose processes run on this machine: faults reach them by process id."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    @property
    def gateway_url(self) -> str:
        """http(s)://host:port."""
        ...

    @property
    def token(self) -> Token:
        """The cluster token, from which tenants of the run come."""
        ...

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Whom to trust at the gateway; None where it speaks plain HTTP."""
        ...

    @property
    def parts(self) -> Sequence[str]:
        """Names of the parts, from which follows what can be hit in each (`aims_of`)."""
        ...

    async def pid_of(self, part: str, aim: Aim) -> int:
        """Process id of what a fault aims at in a part; 0 while there is none. Raises MooncacheError."""
        ...

    async def not_well(self) -> str:
        """What is not well, in a few words; empty when everything is."""
        ...

    async def pins_left(self) -> int:
        """Pins that the nodes hold; a node that does not say counts none."""
        ...

    def pool_work(self, tally: PoolTally, run: str) -> PoolWork:
        """A client of the pool that writes into `tally`; `run` is in its keys."""
        ...
