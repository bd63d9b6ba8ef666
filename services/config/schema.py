"""The schema: every setting with its type, limits, default and meaning.

Sections are frozen models. The name of a setting is `section.field` in TOML and MOONCACHE_<SECTION>_<FIELD>
in the environment. Units are the end of the name. A default must be safe on a laptop: loopback, modest
memory, no TLS files.
"""

from __future__ import annotations

from pydantic import PrivateAttr

from mooncache.config.base import Section
from mooncache.config.pool import (
    ClientSection,
    ClusterSection,
    CoordinationSection,
    GrpcSection,
    LoggingSection,
    MasterSection,
    MetricsSection,
    RdmaSection,
    StoreNodeSection,
    TlsSection,
)
from mooncache.config.serving import (
    ConductorSection,
    ConnectorSection,
    EndpointPickerSection,
    GatewaySection,
    HfSection,
    SglangSection,
    TracingSection,
    VllmSection,
    WorkerSection,
)

CLUSTER_SETTINGS = "cluster.toml"
"""Name of the file in the state folder with what a machine was given with its cluster."""


class Config(Section):
    """The whole configuration. Made by config.load; `config.explain` tells where each value came from."""

    cluster: ClusterSection = ClusterSection()
    """What all processes of one cluster share."""
    master: MasterSection = MasterSection()
    """The metadata master."""
    store_node: StoreNodeSection = StoreNodeSection()
    """A store node."""
    client: ClientSection = ClientSection()
    """The client SDK and the commands."""
    rdma: RdmaSection = RdmaSection()
    """RDMA."""
    tls: TlsSection = TlsSection()
    """TLS."""
    grpc: GrpcSection = GrpcSection()
    """Control ports."""
    logging: LoggingSection = LoggingSection()
    """Logs."""
    metrics: MetricsSection = MetricsSection()
    """The HTTP port for metrics and health."""
    coordination: CoordinationSection = CoordinationSection()
    """How masters agree on a leader."""
    conductor: ConductorSection = ConductorSection()
    """The global scheduler."""
    gateway: GatewaySection = GatewaySection()
    """The OpenAI-compatible HTTP service."""
    endpoint_picker: EndpointPickerSection = EndpointPickerSection()
    """The endpoint picker for Envoy."""
    worker: WorkerSection = WorkerSection()
    """The supervisor beside one engine."""
    vllm: VllmSection = VllmSection()
    """How a worker starts vLLM."""
    sglang: SglangSection = SglangSection()
    """How a worker starts SGLang."""
    hf: HfSection = HfSection()
    """The small engine on Hugging Face transformers."""
    connector: ConnectorSection = ConnectorSection()
    """How an engine uses the pool."""
    tracing: TracingSection = TracingSection()
    """OpenTelemetry."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def joined(self) -> bool:
        """Whether this machine belongs to the cluster of another one: `mooncache join` says where the master is."""
        return self._sources.get("cluster.master_targets", "").endswith(f"/{CLUSTER_SETTINGS}")
