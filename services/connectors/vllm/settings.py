"""Settings of the connector: `mooncache.*` keys of vLLM's kv_connector_extra_config over the usual configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncache.config import Config, ConnectorSection, load
from mooncache.connectors.settings import own_settings
from mooncache.errors import ConfigInvalid

_OWN = ("passport_path", "state_dir", "master_targets", "chat_template")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """What one engine's connector is given beside vLLM's own configuration."""

    connector: ConnectorSection
    state_dir: Path
    master_targets: str  # "" takes the configured
    passport_path: Path | None  # where the engine's identity is written, if anywhere
    chat_template: str = ""
    """The engine's --chat-template, which vLLM does not pass to the connector."""


def read_settings(extra: Mapping[str, object], base: Mapping[str, object] | None = None) -> ConnectorSettings:
    """From the engine's extra configuration. Keys of other owners are left alone.

    Raises:
        ConfigInvalid: an unknown `mooncache.` key or a value that cannot be used.
    """
    own, given = own_settings(extra, _OWN, "kv_connector_extra_config")
    overrides: dict[str, object] = {**(base or {}), **given}
    if own.get("state_dir"):
        overrides["cluster.state_dir"] = own["state_dir"]
    config: Config = load(overrides=overrides)
    if config.connector.layer_groups > 1 and not config.connector.head_groups:
        raise ConfigInvalid(
            "connector.layer_groups needs connector.head_groups, of which 1 keeps all heads together."
        )
    path = own.get("passport_path")
    return ConnectorSettings(
        connector=config.connector,
        state_dir=config.cluster.state_dir,
        master_targets=own.get("master_targets", ""),
        passport_path=Path(path).expanduser() if path else None,
        chat_template=own.get("chat_template", ""),
    )
