"""One typed configuration for every process: TOML file, environment, overrides; the same names everywhere."""

from mooncache.config.audience import Audience
from mooncache.config.loading import ExplainedSetting, explain, is_set, load, to_toml
from mooncache.config.pool import (
    ClientSection,
    ClusterSection,
    CoordinationSection,
    GrpcSection,
    LoggingSection,
    MasterSection,
    MetricsSection,
    StoreNodeSection,
    TlsSection,
)
from mooncache.config.schema import CLUSTER_SETTINGS, Config
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
from mooncache.config.units import parse_duration_s, parse_size_bytes

__all__ = [
    "CLUSTER_SETTINGS",
    "Audience",
    "ClientSection",
    "ClusterSection",
    "ConductorSection",
    "Config",
    "ConnectorSection",
    "CoordinationSection",
    "EndpointPickerSection",
    "ExplainedSetting",
    "GatewaySection",
    "GrpcSection",
    "HfSection",
    "LoggingSection",
    "MasterSection",
    "MetricsSection",
    "SglangSection",
    "StoreNodeSection",
    "TlsSection",
    "TracingSection",
    "VllmSection",
    "WorkerSection",
    "explain",
    "is_set",
    "load",
    "parse_duration_s",
    "parse_size_bytes",
    "to_toml",
]
