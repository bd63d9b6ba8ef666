"""Everything a client needs to know, gathered once: where the cluster is, who the caller is, limits, TLS."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from mooncache._version import __version__
from mooncache.auth import SessionToken, parse_token, parse_token_file, read_private_file, tenant_token
from mooncache.client.host import host_id
from mooncache.client.limits import check_timeout
from mooncache.client.master_link import parse_targets
from mooncache.client.results import ClusterView, MapNodeState, NodeView
from mooncache.client.state_dir import read_cluster_file
from mooncache.client.token_file import Credentials, FollowedToken, KeyFollower
from mooncache.client.writer import writer_settings
from mooncache.config import Config, TlsSection, is_set, load
from mooncache.errors import ConfigInvalid, InvalidArgument

if TYPE_CHECKING:
    import grpc

    from mooncache._native import Client as NativeClient
    from mooncache.runtime.grpc_channel import GrpcChannel

MAX_STATIC_NODES = 4096
MAX_LANES = 64
LANES_PER_NODE = 2
REGISTERED_BYTES_MAX = 16 << 30
REGISTERED_BUFFERS_MAX = 256
FANOUT_NODES_MAX = 8  # of larger clusters the master is asked
CONNECT_TIMEOUT_S = 5.0
_TOKEN_BYTES_MAX = 4096


def read_token_file(path: Path) -> str:
    """The token of a file that its reader shows: the one line, or the one that signs while there are two.

    Raises:
        ConfigInvalid: missing, unreadable, or readable by others.
    """
    missing = (
        f"There is no token file at {path}. Pass token= or token_file=, set MOONCACHE_CLUSTER_TOKEN_FILE, "
        "or start a cluster here with `mooncache up`."
    )
    data, _ = read_private_file(path, "The token file", _TOKEN_BYTES_MAX, missing)
    text = data.decode("ascii", "replace").strip()
    return parse_token_file(data, path).signing.text if "\n" in text else text


def parse_static_node(text: str, index: int) -> NodeView:
    """A node given as "host:port" or "unix:/path", with its name in front when it is known ("node-1@host:port").

    Names decide where blocks are placed: with several nodes, give them, so that blocks spread over all of them.
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"A node is given as text (host:port); got {type(text).__name__}.")
    name, at, address = text.rpartition("@")
    known = {"node_id": name if at else text, "named": bool(at)}
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/"):
            raise InvalidArgument(f"{text!r} is not a node. Expected unix:/absolute/path.")
        base = NodeView(index, "", host_id(), 0, MapNodeState.ACTIVE, "", 0, path)
        return dataclasses.replace(base, **known)  # type: ignore[arg-type]
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidArgument(f"{text!r} is not a node. Expected host:port or unix:/absolute/path.")
    base = NodeView(index, "", "", 0, MapNodeState.ACTIVE, host.strip("[]"), int(port), "")
    return dataclasses.replace(base, **known)  # type: ignore[arg-type]


class ConnectSettings(TypedDict, total=False):
    """What every way to connect takes as keywords beside `master`; `Client` describes each."""

    token: str | None
    token_file: str | None
    tenant: str | None
    nodes: Sequence[str] | None
    timeout_s: float | None
    connect_timeout_s: float | None
    client_name: str
    build: str
    shm: bool | None
    lanes_per_node: int | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    state_dir: str | None


@dataclass(frozen=True)
class ClientOptions:
    """A client's settings, checked. Make it with `gather`."""

    targets: tuple[str, ...]
    nodes: tuple[NodeView, ...]
    token: str = field(repr=False)
    key: bytes = field(repr=False)
    tenant: str
    timeout_s: float
    replicas: int
    connect_timeout_s: float
    client_name: str
    build: str
    shm: bool
    lanes_per_node: int
    idle_timeout_s: float
    receive_pool_bytes: int
    host_id: str
    tls: TlsSection
    rdma: dict[str, object]
    blast_radius: dict[str, object]
    followed: FollowedToken | None = field(default=None, repr=False)
    """The file that the token comes from; None for a text."""

    @classmethod
    def gather(
        cls,
        master: str | Sequence[str] | None = None,
        *,
        config: Config | None = None,
        **settings: Unpack[ConnectSettings],
    ) -> Self:
        """Fill what was not given from the configuration and the state folder, and check all of it."""
        if unknown := settings.keys() - ConnectSettings.__annotations__.keys():
            raise TypeError(f"connecting takes no argument {', '.join(sorted(unknown))}")
        nodes, lanes_per_node = settings.get("nodes"), settings.get("lanes_per_node")
        timeout_s, connect_timeout_s = settings.get("timeout_s"), settings.get("connect_timeout_s")
        shm = settings.get("shm")
        if master is not None and nodes is not None:
            raise InvalidArgument("Give either master= or nodes=, not both: nodes= works without any master.")
        if isinstance(nodes, str):
            raise InvalidArgument(
                "nodes= expects a list of addresses, got a single text. Wrap it: [address]."
            )
        if lanes_per_node is not None and not 1 <= lanes_per_node <= MAX_LANES:
            raise InvalidArgument(f"lanes_per_node must be between 1 and {MAX_LANES}; got {lanes_per_node}.")
        if config is None:
            config = load(overrides={"cluster.state_dir": settings.get("state_dir")})
        folder = config.cluster.state_dir
        tls = _tls(config.tls, settings.get("tls_ca"), settings.get("tls_cert"), settings.get("tls_key"))
        targets: tuple[str, ...] = ()
        static: tuple[NodeView, ...] = ()
        if nodes is not None:
            if not 1 <= len(nodes) <= MAX_STATIC_NODES:
                raise InvalidArgument(f"nodes= must name 1 to {MAX_STATIC_NODES} nodes; got {len(nodes)}.")
            static = tuple(parse_static_node(text, index) for index, text in enumerate(nodes))
        else:
            targets, tls = _find_cluster(master, config, folder, tls)
        followed = _followed(
            settings.get("token"), settings.get("token_file"), settings.get("tenant"), config
        )
        if isinstance(followed, FollowedToken):
            text, key, name = followed.credentials
        else:
            text, key, name = followed
        client = config.client
        return cls(
            targets=targets,
            nodes=static,
            token=text,
            key=key,
            tenant=name,
            timeout_s=client.timeout_s if timeout_s is None else check_timeout(timeout_s),
            replicas=client.replicas,
            connect_timeout_s=CONNECT_TIMEOUT_S
            if connect_timeout_s is None
            else check_timeout(connect_timeout_s),
            client_name=settings.get("client_name") or f"python-{os.getpid()}",
            build=settings.get("build") or f"mooncache {__version__}",
            shm=client.shm_enabled if shm is None else shm,
            lanes_per_node=lanes_per_node or LANES_PER_NODE,
            idle_timeout_s=client.idle_timeout_s,
            receive_pool_bytes=client.receive_pool_bytes,
            host_id=client.host_id or host_id(),
            tls=tls,
            rdma=config.rdma.native(),
            blast_radius=client.blast_radius(),
            followed=followed if isinstance(followed, FollowedToken) else None,
        )

    def static_view(self) -> ClusterView:
        """The map of a client without a master."""
        return ClusterView(nodes=self.nodes)

    @cached_property
    def _channel_credentials(self) -> grpc.ChannelCredentials | None:
        from mooncache.runtime.tls import channel_credentials

        return channel_credentials(self.tls)

    def master_channel(self, target: str) -> GrpcChannel:
        """A control channel to one master target."""
        from mooncache.errors import MasterUnavailable
        from mooncache.runtime.grpc_channel import GrpcChannel
        from mooncache.runtime.rpc import MASTER_SERVICE

        return GrpcChannel(
            target,
            MASTER_SERVICE,
            token=self.followed or self.token,
            credentials=self._channel_credentials,
            unavailable_error=MasterUnavailable,
            server_name=self.tls.server_name,
        )


def _find_cluster(
    master: str | Sequence[str] | None, config: Config, folder: Path, tls: TlsSection
) -> tuple[tuple[str, ...], TlsSection]:
    if master is not None:
        return parse_targets(master), tls
    if is_set(config, "cluster.master_targets"):
        return parse_targets(config.cluster.master_targets), tls
    cluster = read_cluster_file(folder)
    if cluster is None:
        raise ConfigInvalid(
            f"No master was given and {folder} has no running cluster. Pass the master's host:port, set "
            "MOONCACHE_CLUSTER_MASTER_TARGETS, or start a cluster here with `mooncache up`."
        )
    if cluster.tls_ca and not tls.enabled:
        tls = TlsSection.model_validate({"enabled": True, "ca_file": cluster.tls_ca})
    return parse_targets(cluster.master_targets), tls


def _tls(section: TlsSection, ca: str | None, cert: str | None, key: str | None) -> TlsSection:
    """The configured TLS settings, overlaid with the caller's files."""
    if (cert is None) != (key is None):
        raise InvalidArgument("tls_cert and tls_key belong together; only one of them was given.")
    if cert is not None and ca is None and not section.enabled:
        raise InvalidArgument(
            "tls_cert needs tls_ca: the file that the nodes' certificates are checked against."
        )
    files = {"ca_file": ca, "cert_file": cert, "key_file": key}
    given = {name: path for name, path in files.items() if path is not None}
    for name, path in given.items():
        if not Path(path).is_file():
            raise InvalidArgument(f"tls_{name.removesuffix('_file')}: there is no file {path}.")
    if not given:
        return section
    return TlsSection.model_validate({**section.model_dump(), "enabled": True, **given})


def _followed(
    token: str | None, token_file: str | None, tenant: str | None, config: Config
) -> Credentials | FollowedToken:
    """What the client shows: of a text, or of a file as it is whenever it is asked for."""
    if token is not None and token_file is not None:
        raise InvalidArgument("Give either token= or token_file=, not both.")
    if token is None and token_file is None and config.client.token:
        token = config.client.token
    if token is not None:
        return _credentials(token, tenant)
    path = Path(token_file).expanduser() if token_file else config.cluster.token_path
    return FollowedToken(path, lambda path: _credentials(read_token_file(path), tenant))


def _credentials(token: str, tenant: str | None) -> Credentials:
    """Of the text of a token. Raises Unauthenticated, InvalidArgument."""
    parsed = parse_token(token)
    if tenant is not None and tenant != parsed.tenant:
        if not parsed.admin:
            raise InvalidArgument(
                f"The token belongs to tenant {parsed.tenant!r} and cannot act as {tenant!r}. "
                "Use that tenant's token, or the cluster token."
            )
        parsed = tenant_token(parsed, tenant)
    return parsed.text, parsed.tenant_key, parsed.tenant


def key_follower(options: ClientOptions, native: NativeClient) -> KeyFollower | None:
    """Keeps the native client's key as the token's file has it; None for a token that is no file's."""
    return None if options.followed is None else KeyFollower(options.followed, native.set_key)


def new_native(options: ClientOptions, session: SessionToken | None = None) -> NativeClient:
    """The native client core for these options; with a session token its sessions at nodes act for that tenant."""
    from mooncache import _native

    config: dict[str, object] = {
        "key": session.key if session else options.key,
        "tenant": session.tenant if session else options.tenant,
        "session_end_unix_s": session.end_unix_s if session else 0,
        "admin": False,
        "host_id": options.host_id,
        "client_name": options.client_name,
        **writer_settings(options.client_name, options.build),
        "lanes_per_node": options.lanes_per_node,
        "idle_timeout_s": options.idle_timeout_s,
        "connect_timeout_s": min(options.connect_timeout_s, CONNECT_TIMEOUT_S),
        "shm_enabled": options.shm,
        "fanout_nodes_max": FANOUT_NODES_MAX,
        "receive_pool_bytes": options.receive_pool_bytes,
        "registered_bytes_max": REGISTERED_BYTES_MAX,
        "registered_buffers_max": REGISTERED_BUFFERS_MAX,
        **options.rdma,
        **options.blast_radius,
    }
    if options.tls.enabled:
        config |= {
            "tls": True,
            "tls_ca": str(options.tls.ca_file or ""),
            "tls_cert": str(options.tls.cert_file or ""),
            "tls_key": str(options.tls.key_file or ""),
            "tls_server_name": options.tls.server_name,
        }
    return _native.Client(config)
