"""The console of one gateway: its collector, its viewers, and who may see it."""

from __future__ import annotations

import random
from typing import Final

from mooncache.accounts.database import AccountsPlace
from mooncache.auth import TokenSource, console_key
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.master_link import MasterLink, parse_targets
from mooncache.config import Config
from mooncache.errors import PermissionDenied, Unauthenticated
from mooncache.gateway.console.acts import AuditedActs, ConsoleActs
from mooncache.gateway.console.collector import Collector
from mooncache.gateway.console.doctor import DoctorRuns
from mooncache.gateway.console.keys import ConsoleKeys
from mooncache.gateway.console.viewers import Viewers
from mooncache.gateway.core import console_session
from mooncache.gateway.core.console_money import ConsoleMoney
from mooncache.gateway.core.console_session import ConsoleSession, TenantKey
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.shell.keyring import Keyring
from mooncache.prices.core.price_book import PriceBook
from mooncache.runtime.channel import Channel
from mooncache.runtime.clock import Clock
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.live_tokens import LiveTokens
from mooncache.runtime.rpc import MASTER_SERVICE
from mooncache.runtime.tls import channel_credentials

QUESTIONS_MAX: Final = 8
"""Records that pages ask for at the same time."""


class Console:
    """Everything of the console that lives as long as the gateway."""

    def __init__(
        self,
        config: Config,
        tokens: LiveTokens,
        clock: Clock,
        keyring: Keyring,
        accounts: AccountsPlace,
        book: PriceBook | None = None,
    ) -> None:
        """accounts: where keys, limits and the audit log are. book: prices, for money; None: none is shown."""
        self._tokens, self._clock, self._keyring = tokens, clock, keyring
        self._secure = config.tls.enabled
        self.questions = 0  # records that are asked for now
        self.viewers = Viewers()
        link = ConductorLink(config.cluster.conductor_target, tokens, config, listen=False)
        master = _master_link(config, tokens, clock)
        self._may_act = config.gateway.console_acts
        self._audited = AuditedActs(clock, accounts)
        self.acts = ConsoleActs(link, master, self._audited)
        self.keys = ConsoleKeys(self._audited, clock, accounts)
        self.doctor = DoctorRuns(clock)
        self.collector = Collector(
            link,
            master,
            clock,
            self.viewers,
            ConsoleMoney(book) if book is not None else None,
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
        cookie = exchange.headers.get("cookie", "")
        read = (
            console_session.session_of(console_key(token), cookie, now_s) for token in self._tokens.tokens
        )
        found = next((session for session in read if session is not None), None)
        return found if found is not None and self._keyring.is_signed_in(found.who) else None

    def renew(self, session: ConsoleSession) -> str:
        """The Set-Cookie header that makes a session last longer; "" when it is not time."""
        longer = console_session.renewed(session, self._clock.wall_s())
        return self._cookie(longer) if longer is not None else ""

    def left_s(self, exchange: Exchange) -> float:
        """Check that an operator sent a request; for how long it may be answered.

        A program may show its key instead of a session. Raises Unauthenticated, PermissionDenied.
        """
        who, left_s = self._who(exchange)
        key = console_session.tenant_key_of(who)
        if key is not None:
            raise PermissionDenied(
                f"This is a key of tenant {key.tenant}, which sees its own usage alone. Other pages show all tenants' "
                "requests: they need the cluster token, or a key with `console = true` in gateway.keys_file."
            )
        return left_s

    def may_act(self, who: str) -> bool:
        """Whether who signed in under this name may change the cluster here."""
        return self._may_act and who == console_session.CLUSTER

    def operator(self, exchange: Exchange) -> str:
        """Check that who sent a request may change the cluster; its name in the audit log.

        Raises Unauthenticated, PermissionDenied.
        """
        who, _ = self._who(exchange)
        if not self._may_act:
            raise PermissionDenied("This console only shows: gateway.console_acts is false.")
        if not self.may_act(who):
            raise PermissionDenied(
                "This key only looks. To change something sign in with the cluster token, or use the command line on a "
                "machine of the cluster."
            )
        return "the cluster token"

    def viewer(self, exchange: Exchange) -> TenantKey | None:
        """Who sent a request: a tenant, or None for an operator. Raises Unauthenticated, PermissionDenied."""
        return console_session.tenant_key_of(self._who(exchange)[0])

    def _who(self, exchange: Exchange) -> tuple[str, float]:
        session = self.session(exchange)
        if session is not None:
            return session.who, session.until_s - self._clock.wall_s()
        authorization = exchange.headers.get("authorization", "")
        if not authorization:
            raise Unauthenticated(
                "You are not signed in to the console, or no longer. Open /console to sign in."
            )
        return self._keyring.console_name(authorization), float(console_session.SESSION_S)

    async def close(self) -> None:
        """End all streams and connections."""
        self.viewers.close()
        await self._audited.close()
        await self.doctor.close()
        await self.collector.close()

    def _cookie(self, session: ConsoleSession) -> str:
        left_s = max(0, session.until_s - int(self._clock.wall_s()))
        return console_session.set_cookie(
            console_session.cookie_value(console_key(self._tokens.signing), session),
            left_s,
            secure=self._secure,
        )


def _master_link(config: Config, tokens: TokenSource, clock: Clock) -> MasterLink:
    def channel(target: str) -> Channel:
        return GrpcChannel(
            target,
            MASTER_SERVICE,
            token=tokens,
            credentials=channel_credentials(config.tls),
            server_name=config.tls.server_name,
        )

    return MasterLink(parse_targets(config.cluster.master_targets), channel, clock, random.Random())
