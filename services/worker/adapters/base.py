"""What a worker has to know about a kind of engine. Everything else about supervising is the same for all.

An engine is a process with an OpenAI-compatible HTTP server: GET /health (200 when ready), GET /v1/models,
GET /metrics (Prometheus), a Bearer key, and SIGTERM for its end. An adapter says how to start it and how to
read it. To supervise an engine of your own, subclass this and set `worker.engine` to "package.module:Class".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from mooncache.config import Config
from mooncache.worker.core.facts import EngineFacts, facts_from_http
from mooncache.worker.core.load import MetricNames, read_labels


@dataclass(frozen=True, slots=True)
class Launch:
    """One start, as the worker wants it."""

    instance_id: str
    model: str
    model_name: str
    host: str
    port: int
    engine_key: str = field(repr=False)
    """Bearer key that the engine has to ask for. It may be passed on in the environment only, never on the command
    line."""
    passport_path: Path
    state_dir: Path
    events_endpoint: str = ""
    """ZeroMQ endpoint (ipc://) that the engine binds for its cache events; empty when it shall not publish any."""
    replay_endpoint: str = ""
    """The same for the replay of cache events."""
    tls_cert: Path | None = None
    """PEM file of the certificate with which the engine has to speak HTTPS; None for plain HTTP."""
    tls_key: Path | None = None
    """PEM file of the private key; None for plain HTTP."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `env` goes on top of the worker's own environment; None takes a variable away."""

    arguments: tuple[str, ...]
    env: dict[str, str | None] = field(default_factory=dict)


class EngineAdapter(ABC):
    """How to start and read one kind of engine. `config` is the whole configuration; adapters read their section."""

    name: ClassVar[str]
    """Name of the kind of engine, as instances carry it."""
    metrics: ClassVar[MetricNames]
    """How its Prometheus page calls the load."""
    kv_events: ClassVar[bool] = False
    """Whether it can publish events of its prefix cache (vLLM's ZeroMQ protocol)."""

    info_path: ClassVar[str] = "/version"
    """Where its HTTP server says what it is."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def facts(self, models: object, info: object, page: str) -> EngineFacts:
        """What a running engine says of itself: its /v1/models, the answer of `info_path`, its /metrics."""
        return facts_from_http(models, info, read_labels(page, "vllm:cache_config_info"))

    @abstractmethod
    def command(self, launch: Launch) -> Command:
        """Command line and environment of one start. Raises ConfigInvalid."""

    @property
    def publishes_events(self) -> bool:
        """Whether this engine, as configured, publishes cache events."""
        return self.kv_events

    @property
    def why_no_events(self) -> str:
        """Why an engine that publishes cache events is not asked to, as it is configured; "" without such a reason."""
        return ""

    @property
    def makes_passport(self) -> bool:
        """Whether the engine writes a passport file when it uses the pool."""
        return self.config.connector.enabled

    @property
    def max_sequences(self) -> int:
        """Sequences that the engine runs at once; 0: not known."""
        return 0

    @property
    def orders_by_priority(self) -> bool:
        """Whether its queue takes requests of a lower `priority` in their bodies first; else that field is not sent."""
        return False


def section_env(config: Config, sections: Iterable[str]) -> dict[str, str | None]:
    """The environment that makes another process of ours read the same values in these sections.

    Needed where settings came from a file or from overrides, which the engine's process does not see.
    """
    env: dict[str, str | None] = {}
    for section in sections:
        table = getattr(config, section)
        for name in type(table).model_fields:
            env[f"MOONCACHE_{section}_{name}".upper()] = _text(getattr(table, name))
    return env


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in value)
    return str(value)


def option(arguments: Sequence[str], name: str) -> str:
    """Value of an option among arguments, "" when it is not there; the last one counts."""
    value = ""
    for at, argument in enumerate(arguments):
        word, equals, _ = argument.replace("_", "-").partition("=")
        if word == name:
            value = argument[len(word) + 1 :] if equals else (*arguments, "")[at + 1]
    return value


def ranks_without_events(arguments: Sequence[str], *names: str) -> str:
    """Why several data parallel ranks publish no cache events; "" when an engine has one.

    vLLM and SGLang give each rank a socket of its own by counting a TCP port up. They do not start with a path, and a
    port on loopback is open to every user of the machine.
    """
    for name in names:
        size = option(arguments, name)
        if size.isdigit() and int(size) > 1:
            return (
                f"{name} is {size}: its ranks could publish their cache events on TCP ports only, so they publish "
                "none, and what their own caches hold is not known."
            )
    return ""
