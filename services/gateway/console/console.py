"""The console of one gateway: its collector, its viewers, and who may see it."""

from __future__ import annotations

import random
from typing import Final

from mooncache.auth import Token, console_key
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.master_link import MasterLink, parse_targets
from mooncache.config import Config
from mooncache.errors import Unauthenticated
from mooncache.gateway.console.collector import Collector
from mooncache.gateway.console.viewers import Viewers
from mooncache.gateway.core import console_session
from mooncache.gateway.core.console_session import ConsoleSession
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.keyring import Keyring
from mooncache.runtime.channel import Channel
from mooncache.runtime.clock import Clock
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import MASTER_SERVICE
from mooncache.runtime.tls import channel_credentials

QUESTIONS_MAX: Final = 8
"""Records that pages ask for at the same time."""


class Console:
    """Everything of the console that lives as long as the gateway."""

    def __init__(self, config: Config, token: Token, clock: Clock, keyring: Keyring) -> None:
        self._key, self._clock, self._keyring = console_key(token), clock, keyring
        self._secure = config.tls.enabled
        self.questions = 0  # records that are asked for now
        self.viewers = Viewers()
        self.collector = Collector(
            ConductorLink(config.cluster.conductor_target, token.text, config, listen=False),
            _master_link(config, token, clock),
            clock,
            self.viewers,
        )

    def sign_in(self, authorization: str) -> tuple[ConsoleSession, str]:
        """A new session and its Set-Cookie header. Raises Unauthenticated, PermissionDenied."""
        session = console_session.begin(self._keyring.console_name(authorization), self._clock.wall_s())
        return session, self._cookie(session)

    def sign_out(self) -> str:
        """The Set-Cookie header that ends a session."""
        return console_session.set_cookie("", 0, secure=self._secure)

    def session(self, exchange: Exchange) -> ConsoleSession | None:
        """The session of a request; None without one that is good. A key that was taken away has none."""
        now_s = self._clock.wall_s()
        found = console_session.session_of(self._key, exchange.headers.get("cookie", ""), now_s)
        return found if found is not None and self._keyring.opens_console(found.who) else None

    def renew(self, session: ConsoleSession) -> str:
        """The Set-Cookie header that makes a session last longer; "" when it is not time."""
        longer = console_session.renewed(session, self._clock.wall_s())
        return self._cookie(longer) if longer is not None else ""

    def left_s(self, exchange: Exchange) -> float:
        """Check who sent a request; for how long it may be answered.

        A program may show its key instead of a session. Raises Unauthenticated, PermissionDenied.
        """
        session = self.session(exchange)
        if session is not None:
            return session.until_s - self._clock.wall_s()
        authorization = exchange.headers.get("authorization", "")
        if not authorization:
            raise Unauthenticated(
                "You are not signed in to the console, or no longer. Open /console to sign in."
            )
        self._keyring.console_name(authorization)
        return float(console_session.SESSION_S)

    async def close(self) -> None:
        """End all streams and connections."""
        self.viewers.close()
        await self.collector.close()

    def _cookie(self, session: ConsoleSession) -> str:
        left_s = max(0, session.until_s - int(self._clock.wall_s()))
        return console_session.set_cookie(
            console_session.cookie_value(self._key, session), left_s, secure=self._secure
        )


def _master_link(config: Config, token: Token, clock: Clock) -> MasterLink:
    def channel(target: str) -> Channel:
        return GrpcChannel(
            target,
            MASTER_SERVICE,
            token=token.text,
            credentials=channel_credentials(config.tls),
            server_name=config.tls.server_name,
        )

    return MasterLink(parse_targets(config.cluster.master_targets), channel, clock, random.Random())
