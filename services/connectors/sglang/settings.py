"""Settings of the backend: `mooncache.*` keys of --hicache-storage-backend-extra-config, over the usual ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncache.config import Config, ConnectorSection, load
from mooncache.connectors.settings import own_settings
from mooncache.errors import ConfigInvalid

WHERE: Final = "--hicache-storage-backend-extra-config"
_OWN: Final = ("state_dir", "master_targets", "model_path")
_USED: Final = ("enabled", "load_timeout_s", "save_timeout_s", "registered_bytes_max")


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What one rank's backend is given beside SGLang's own configuration."""

    connector: ConnectorSection
    state_dir: Path
    master_targets: str  # "" takes the configured
    model_path: str  # "" takes the engine's


def read_settings(extra: Mapping[str, Any] | None) -> BackendSettings:
    """From the engine's extra configuration.

    Raises:
        ConfigInvalid: an unknown `mooncache.` key, a value that cannot be used, or `interface_v1` is missing.
    """
    extra = extra or {}
    own, overrides = own_settings(extra, _OWN, WHERE, _USED)
    if not extra.get("interface_v1"):
        raise ConfigInvalid(
            f'{WHERE} needs "interface_v1": 1: without it SGLang copies each page twice and asks for one at a time.'
        )
    if own.get("state_dir"):
        overrides["cluster.state_dir"] = own["state_dir"]
    config: Config = load(overrides=overrides)
    return BackendSettings(
        connector=config.connector,
        state_dir=config.cluster.state_dir,
        master_targets=own.get("master_targets", ""),
        model_path=own.get("model_path", ""),
    )
