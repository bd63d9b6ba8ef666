"""Sections of the pool: master, store nodes, clients, and what all processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mooncache.config.accounts_place import DatabaseUrl
from mooncache.config.base import AccountsFolderOrUrl, FilePath, OptionalPath, PortNumber, Section, Words
from mooncache.config.labels import Labels
from mooncache.config.units import DurationS, SizeBytes


class ClusterSection(Section):
    """What all processes of one cluster share."""

    state_dir: FilePath = Path("~/.mooncache")
    """Folder for the cluster token, sockets and small state files; created with mode 0700."""
    token_file: OptionalPath = None
    """File with the cluster token (mode 0600); empty means cluster.token inside state_dir."""
    accounts_dir: AccountsFolderOrUrl = None
    """API keys, usage, audit log: a folder, or postgresql://USER@HOST/NAME; empty means accounts inside state_dir."""
    master_targets: Words = ("127.0.0.1:7700",)
    """gRPC addresses of the masters, host:port. Clients ask them which one leads."""
    conductor_target: str = "127.0.0.1:7800"
    """gRPC address of the conductor, host:port; with standbys those of all conductors, separated by commas."""
    hang_timeout_s: DurationS = Field(default=30.0, ge=0, le=3600)
    """`mooncache up` kills and restarts a process that has not answered for this long; 0: never."""
    spare_processes: bool = True
    """Whether `mooncache up` prepares the next process of each node that keeps its memory, for after a crash."""

    @property
    def token_path(self) -> Path:
        """Where the cluster token is."""
        return self.token_file or self.state_dir / "cluster.token"

    @property
    def accounts_place(self) -> Path | DatabaseUrl:
        """Where API keys, limits, usage and the audit log are: a folder of this host, or a database."""
        return self.accounts_dir or self.state_dir / "accounts"


class MasterSection(Section):
    """The metadata master."""

    host: str = "127.0.0.1"
    """Address to listen on; anything beyond loopback has to be chosen here."""
    port: PortNumber = 7700
    """Port of the control service; 0 means any free port."""
    advertise_host: str = ""
    """Host that others reach this master by; empty means `host`."""
    master_id: str = Field(default="", max_length=128)
    """Name of this master; empty makes one from host name and port."""
    metrics_port: PortNumber = 0
    """Port for /metrics, /health and /ready; 0 means any free port."""
    heartbeat_interval_s: DurationS = Field(default=1.0, gt=0, le=60)
    """How often nodes send heartbeats."""
    suspect_after_s: DurationS = Field(default=2.5, gt=0, le=300)
    """Silence after which a node is used only when no other is possible."""
    lease_s: DurationS = Field(default=5.0, gt=0, le=600)
    """Silence after which a node counts as dead and its blocks leave the directory."""
    slow_start_s: DurationS = Field(default=30.0, ge=0, le=3600)
    """Time over which a new or returning node grows to its full placement weight."""
    replicas: int = Field(default=1, ge=1, le=16)
    """Copies of each block that the pool keeps, on distinct nodes; a tenant's own number goes first."""
    repair_bytes_per_s: SizeBytes = 256 << 20
    """Limit on copying blocks that have too few copies, in bytes per second and for the whole pool; 0 copies none."""
    repair_grace_s: DurationS = Field(default=30.0, ge=0, le=86400)
    """Copies of a lost node's blocks are made when the node has not come back within this time; moves wait as long."""
    rebalance_bytes_per_s: SizeBytes = 64 << 20
    """Limit on moving blocks to emptier nodes when nodes came or went, in bytes per second in all; 0 moves none."""
    quarantine_alone_max: int = Field(default=1, ge=0, le=64)
    """Writers that one engine alone may have quarantined at a time; for each further one a second has to agree."""

    @model_validator(mode="after")
    def _ordered(self) -> MasterSection:
        if not self.heartbeat_interval_s < self.suspect_after_s < self.lease_s:
            raise ValueError("heartbeat_interval_s < suspect_after_s < lease_s has to hold")
        return self


class StoreNodeSection(Section):
    """A store node: the memory it contributes and the ports it opens."""

    node_id: str = Field(default="", max_length=128)
    """Name of the node, stable over restarts; empty means a name kept in state_dir."""
    host_id: str = Field(default="", max_length=128)
    """Name of the machine; equal for processes that can share memory. Empty means the machine's own id."""
    labels: Labels = ()
    """Where the node is, as zone=a,rack=r1: copies of a block are kept in different zones, racks and hosts."""
    host: str = "127.0.0.1"
    """Address that the control service listens on."""
    port: PortNumber = 0
    """Port of the control service; 0 means any free port."""
    data_host: str = "127.0.0.1"
    """Address that the data port listens on."""
    data_port: PortNumber = 0
    """Port for block bytes; 0 means any free port."""
    advertise_host: str = ""
    """Host that others reach this node by; empty means `host` and `data_host`."""
    unix_path: OptionalPath = None
    """Data socket for processes on the same host; empty means a path inside state_dir."""
    unix_enabled: bool = True
    """Whether processes on the same host may use shared memory."""
    metrics_port: PortNumber = 0
    """Port for /metrics, /health and /ready; 0 means any free port."""
    capacity_bytes: SizeBytes = 0
    """Memory for blocks; 0 means all of arena_path, else a quarter of the memory available at start."""
    arena_path: OptionalPath = None
    """DAX device or file that blocks lie in, or a folder for a file without a name; empty means host memory."""
    arena_device: str = Field(default="", pattern=r"^(cuda:[0-9]{1,3})?$")
    """GPU that blocks lie on, like cuda:0, with capacity_bytes of its memory; empty means host memory."""
    ssd_bytes: SizeBytes = 0
    """Size of the file on each disk, its index included; 0 means no SSD tier."""
    ssd_paths: Words = ()
    """Folders, files or block devices of the SSD tier, one a disk; empty means a folder inside state_dir."""
    ssd_write_bytes_per_s: SizeBytes = 0
    """Limit on the bytes written to each disk per second, averaged over a minute; 0 means no limit."""
    ssd_dwpd: float = Field(default=0.0, ge=0, le=100)
    """Drive writes per day: the same limit in writes of the whole disk per day; 0 means no limit."""
    shared_path: OptionalPath = None
    """Folder that several nodes share (NFS, CephFS, ...), below their disks or memory; empty means no shared tier."""
    shared_url: str = Field(default="", pattern=r"^([a-z][a-z0-9+.-]*://.+)?$")
    """Object store in the place of shared_path, like s3://bucket/prefix (any fsspec URL); empty means none."""
    shared_bytes: SizeBytes = Field(default=16 << 30, ge=4 << 20)
    """Size of this node's log in shared_path or shared_url. It never grows; when it is full its oldest blocks go."""
    shared_write_bytes_per_s: SizeBytes = 0
    """Limit on the bytes written to shared_path per second, averaged over a minute; 0 means no limit."""
    shared_scan_ms: int = Field(default=2000, ge=10, le=600_000)
    """Time between two looks at what other nodes wrote to shared_path or shared_url, and removed there."""
    shared_timeout_s: DurationS = Field(default=2.0, ge=0.1, le=60)
    """Time limit of a read from shared_url. A store that takes longer is not used until it answers."""
    shared_upload_s: DurationS = Field(default=10.0, ge=0.1, le=600)
    """A segment that is not full is put into shared_url after this time, so that other nodes can read it."""
    shared_spool_path: OptionalPath = None
    """Folder of this host for what is not in shared_url yet; empty means a folder inside state_dir."""
    shared_spool_bytes: SizeBytes = Field(default=1 << 30, ge=1 << 20)
    """Most bytes in that folder that shared_url has not taken; with more, no block is written."""
    shared_calls: int = Field(default=16, ge=2, le=256)
    """Calls on shared_url at once."""
    expected_block_bytes: SizeBytes = Field(default=4096, ge=64, le=1 << 30)
    """Expected average size of blocks. With a smaller average the node runs out of slots before memory."""
    huge_pages: bool = True
    """Ask for huge pages: those of the host's pool (vm.nr_hugepages), else transparent ones where they are allowed."""
    prefault: bool = True
    """Touch the whole arena before the first block; otherwise the first write to each page pays for it."""
    tenants_file: OptionalPath = None
    """JSON file with what tenants may have, read again when it changes; empty means tenants.json in state_dir."""
    tenant_keys_path: OptionalPath = None
    """Folder with NAME.key, mode 0600, for each tenant whose blocks are encrypted on disks and in shared_path."""
    keep_memory: bool = False
    """Keep blocks in memory for the next start of this node, also after kill -9; needs capacity_bytes."""
    holder_path: OptionalPath = None
    """Socket of the process that holds memory between two starts; empty means a path inside state_dir."""
    start_holder: bool = True
    """Start a holder where none answers; false where one is a service of its own (a container of the same pod)."""
    descriptor_store: bool = False
    """Keep memory in systemd's file descriptor store and not with a holder; the unit needs FileDescriptorStoreMax=."""
    hold_s: DurationS = Field(default=600.0, ge=1, le=86400)
    """How long memory is held while the node does not run; then the system gets it back."""
    numa_node: int = Field(default=-1, ge=-1, le=1023)
    """NUMA node of the arena's memory; -1 takes the node of the thread that first touches each page."""
    eviction: str = ""
    """Which blocks go first: mooncache (learns from the chains asked for; the default, also when empty), 2q or lru."""
    spare_idle_s: DurationS = Field(default=600.0, ge=1, le=86400)
    """An extra copy of a hot block is dropped when nothing has read it for this long; the last copy never is."""
    io_threads: int = Field(default=2, ge=1, le=64)
    """Threads of the data port."""


class ClientSection(Section):
    """The client SDK and the commands that use it."""

    token: str = Field(default="", max_length=256, repr=False)
    """Cluster or tenant token; empty means the cluster token file."""
    timeout_s: DurationS = Field(default=10.0, gt=0, le=3600)
    """Time for one operation when the caller gives none."""
    idle_timeout_s: DurationS = Field(default=600.0, ge=0, le=86400)
    """A connection to a node, with its RDMA queue pairs, that no call used for this long is closed; 0 never."""
    replicas: int = Field(default=1, ge=1, le=16)
    """Copies that a put makes when the caller gives no number."""
    shm_enabled: bool = True
    """Use shared memory with nodes on the same host."""
    host_id: str = Field(default="", max_length=128)
    """Name of this machine; empty means the machine's own id."""
    receive_pool_bytes: SizeBytes = Field(default=256 << 20, le=1 << 40)
    """Memory that `get_view` lends to callers for received values; 0 lends none, and values are copied."""
    hedge_percent: int = Field(default=5, ge=0, le=100)
    """Late reads that may be asked of a second node, per 100 reads; 0 asks none and learns nothing about slow nodes."""
    hedge_min_s: DurationS = Field(default=0.002, ge=0, le=60)
    """A read is late after twice the 99th percentile of its size, but not before this time."""
    hedge_max_s: DurationS = Field(default=0.25, ge=0, le=60)
    """A read is late after this time at most, and while nothing is learned."""
    retry_percent: int = Field(default=20, ge=0, le=100)
    """Batches that may go on to another node after failures, per 100 blocks, beside a burst of 64."""
    retries_per_call: int = Field(default=16, ge=1, le=4096)
    """Batches of one call that may go on to another node after failures."""
    slow_start_s: DurationS = Field(default=2.0, ge=0, le=600)
    """A node that was left alone has its whole share of the reads again after this time; 0 at once."""

    @model_validator(mode="after")
    def _ordered(self) -> ClientSection:
        if self.hedge_min_s > self.hedge_max_s:
            raise ValueError("hedge_min_s must be at most hedge_max_s")
        return self

    def blast_radius(self) -> dict[str, object]:
        """What bounds the load that a sick node causes, as the native client takes it."""
        names = ("hedge_percent", "hedge_min_s", "hedge_max_s", "retry_percent", "retries_per_call")
        return {name: getattr(self, name) for name in (*names, "slow_start_s")}


class RdmaSection(Section):
    """RDMA between clients and store nodes; TCP wherever it is not possible."""

    enabled: bool = True
    """Use RDMA where both sides have an active port; never on TLS connections, RDMA is not encrypted."""
    devices: Words = ()
    """Devices to use, like mlx5_0 or mlx5_0:1; empty means every active port."""
    rails_max: int = Field(default=4, ge=1, le=8)
    """Ports that one connection uses at the same time."""
    gid_index: int = Field(default=-1, ge=-1, le=255)
    """Entry of the port's GID table; -1 chooses RoCE v2 over IPv4, else over IPv6."""
    ack_timeout: int = Field(default=14, ge=8, le=22)
    """A packet without an answer is sent again after 4.096 us * 2^n: 14 is 67 ms."""
    traffic_class: int = Field(default=0, ge=0, le=255)
    """Traffic class of RoCE v2 packets: the DSCP times 4."""
    service_level: int = Field(default=0, ge=0, le=15)
    """Service level, which InfiniBand maps to lanes and RoCE to priorities."""

    def native(self) -> dict[str, object]:
        """As the native client and store server take it."""
        settings = {f"rdma_{name}": value for name, value in self.model_dump().items()}
        return settings | {"rdma_devices": list(self.devices)}


class TlsSection(Section):
    """TLS on the control ports and the TCP data port."""

    enabled: bool = False
    """Speak TLS on every port."""
    insecure: bool = False
    """Open ports beyond loopback without TLS; only for a network where you trust every host."""
    cert_file: OptionalPath = None
    """PEM certificate chain of this process."""
    key_file: OptionalPath = None
    """PEM private key of this process."""
    ca_file: OptionalPath = None
    """PEM authorities to trust; empty means the system's for callers."""
    require_client_cert: bool = False
    """Let in only callers with a certificate of ca_file (mTLS)."""
    server_name: str = ""
    """Name to check a peer's certificate against when it is not the host that was dialled."""

    @model_validator(mode="after")
    def _complete(self) -> TlsSection:
        if self.require_client_cert and self.ca_file is None:
            raise ValueError("require_client_cert needs ca_file")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file have to be set together")
        return self


class GrpcSection(Section):
    """What control ports take from programs that call them over gRPC (docs/grpc.md)."""

    reflection: Literal["auto", "open", "guarded", "off"] = "auto"
    """Who may ask for the services and their messages: all callers, or those with a proof; auto is open on loopback."""
    bearer: bool = True
    """Take a control key as a bearer token on ports with TLS; without it every caller has to send proofs."""


class LoggingSection(Section):
    """Logs."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below this level are not written."""
    format: Literal["auto", "json", "console"] = "auto"
    """JSON lines or a readable console; auto is console on a terminal."""
    info_lines_per_s: int = Field(default=200, ge=0)
    """Info lines of one event in a second; the others are counted in log.lines_left_out. 0: all."""


class MetricsSection(Section):
    """The HTTP port of each service for /metrics, /health and /ready."""

    enabled: bool = True
    """Open the port."""
    host: str = "127.0.0.1"
    """Address to listen on."""


class CoordinationSection(Section):
    """How masters agree on a leader."""

    backend: Literal["embedded", "etcd", "lease"] = "embedded"
    """embedded: one master, no dependency. etcd: leader and standbys. lease: the same by a Lease of Kubernetes."""
    etcd_endpoints: Words = ("127.0.0.1:2379",)
    """Client addresses of the etcd servers, host:port."""
    prefix: str = Field(default="/mooncache/v1", pattern=r"^/[A-Za-z0-9_./-]{1,200}$")
    """Keys of this cluster in etcd begin with this."""
    lease_s: DurationS = Field(default=5.0, ge=1, le=120)
    """Silence of a leader after which another master takes over."""
    etcd_tls: bool = False
    """Speak TLS to etcd with the files of the tls section."""
    etcd_user: str = ""
    """User name at etcd; empty for none."""
    etcd_password: str = Field(default="", repr=False)
    """Password at etcd."""
    lease_name: str = Field(default="mooncache", pattern=r"^[a-z0-9]([-a-z0-9]{0,198}[a-z0-9])?$")
    """Leases of this cluster in Kubernetes are named by this: NAME-masters and NAME-conductors."""
    lease_namespace: str = Field(default="", pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$")
    """Namespace of the Leases; empty means the pod's own."""
    kubernetes_api: str = ""
    """Address of the Kubernetes API, https://HOST:PORT; empty means that of the pod's environment."""
    kubernetes_account: FilePath = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Folder with token, ca.crt and namespace of the service account."""
