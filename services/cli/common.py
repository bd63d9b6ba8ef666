"""Options that several commands share, and how they become a client or a line to the master."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mooncache.client.conductor_link import ConductorLink
    from mooncache.client.master_link import MasterLink
    from mooncache.client.sync import Client
    from mooncache.runtime.channel import Response

T = TypeVar("T")
WHERE = Group("Where the cluster is", sort_key=90)
HOW = Group("Output", sort_key=91)

AsJson = Annotated[bool, Parameter(name="--json", negative=(), group=HOW, help="Print one JSON document.")]


def seconds_of(text: str, option: str, *, above_0: bool = False) -> float:
    """A duration such as 500ms in seconds. Raises InvalidArgument, which names the option."""
    from mooncache.config import parse_duration_s
    from mooncache.errors import InvalidArgument

    try:
        value = parse_duration_s(text)
    except ValueError as error:
        raise InvalidArgument(f"{option}: {error}.") from None
    if above_0 and value <= 0:
        raise InvalidArgument(f"{option}: {text} must be above 0.")
    return value


@Parameter(name="*")
@dataclass(frozen=True)
class Where:
    """Where the cluster is and who the caller is. Without any of these the cluster of `mooncache up` is used."""

    master: Annotated[str | None, Parameter(group=WHERE, help="Master, host:port[,host:port…].")] = None
    conductor: Annotated[str | None, Parameter(group=WHERE, help="Conductor, host:port.")] = None
    token_file: Annotated[Path | None, Parameter(group=WHERE, help="File with the token, mode 0600.")] = None
    tenant: Annotated[
        str | None, Parameter(group=WHERE, help="Act as this tenant (needs the cluster token).")
    ] = None
    state_dir: Annotated[
        Path | None,
        Parameter(group=WHERE, help="State folder; default $MOONCACHE_STATE_DIR or ~/.mooncache."),
    ] = None
    timeout: Annotated[str, Parameter(group=WHERE, help='Time limit, for example "500ms" or "10s".')] = "10s"

    @property
    def timeout_s(self) -> float:
        return seconds_of(self.timeout, "--timeout")

    def settings(self) -> dict[str, Any]:
        """Arguments for `mooncache.connect`."""
        return {
            "master": self.master,
            "token_file": str(self.token_file) if self.token_file else None,
            "tenant": self.tenant,
            "state_dir": str(self.state_dir) if self.state_dir else None,
            "timeout_s": self.timeout_s,
            "connect_timeout_s": min(self.timeout_s, 5.0),
            "client_name": "mooncache-cli",
        }

    def connect(self) -> Client:
        """A sync client."""
        import mooncache

        return mooncache.connect(**self.settings())

    def ask_master(self, work: Callable[[MasterLink], Awaitable[T]]) -> T:
        """Run `work(link)` with a line to the master and close it."""
        from mooncache.client.master_link import MasterLink
        from mooncache.client.options import ClientOptions
        from mooncache.runtime.clock import SystemClock

        options = ClientOptions.gather(**self.settings())

        async def run() -> T:
            link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
            try:
                return await work(link)
            finally:
                await link.close()

        return asyncio.run(run())

    def conductor_target(self) -> str:
        """host:port of the conductor; empty when neither options, settings nor the running cluster here name one.

        The cluster that runs here says nothing about a master that was named.
        """
        from mooncache.client.state_dir import read_cluster_file
        from mooncache.config import is_set, load

        if self.conductor:
            return self.conductor
        config = load(overrides={"cluster.state_dir": self.state_dir})
        if is_set(config, "cluster.conductor_target"):
            return config.cluster.conductor_target
        cluster = None if self.master else read_cluster_file(config.cluster.state_dir)
        return cluster.conductor_target if cluster is not None else ""

    def conductor_channel(self) -> ConductorLink:
        """A line to the conductor that leads, for use inside one event loop. Close it.

        Raises:
            ConfigInvalid: the conductor's address is not configured.
        """
        from mooncache.client.conductor_link import ConductorLink
        from mooncache.client.options import ClientOptions
        from mooncache.config import load
        from mooncache.errors import ConfigInvalid

        target = self.conductor_target()
        if not target:
            raise ConfigInvalid(
                "No conductor is known here. Start engines with `mooncache up`, name it with --conductor, or set "
                "cluster.conductor_target (MOONCACHE_CLUSTER_CONDUCTOR_TARGET)."
            )
        options = ClientOptions.gather(**{**self.settings(), "master": self.master or "127.0.0.1:1"})
        config = load(overrides={"cluster.state_dir": self.state_dir})
        config = config.model_copy(update={"tls": options.tls})
        return ConductorLink(target, options.token, config, listen=False)

    def ask_conductor(self, method: str, request: Message, response_class: type[Response]) -> Response:
        """One call to the conductor."""

        async def run() -> Response:
            channel = self.conductor_channel()
            try:
                return await channel.call(method, request, response_class, self.timeout_s)
            finally:
                await channel.close()

        return asyncio.run(run())


HERE = Where()
"""The cluster that the configuration and the state folder know of."""
