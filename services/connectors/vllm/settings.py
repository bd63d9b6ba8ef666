"""Settings of the connector: `mooncache.*` keys of vLLM's kv_connector_extra_config over the usual configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncache.config import Config, ConnectorSection, load
from mooncache.errors import ConfigInvalid

PREFIX = "mooncache."
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
    known = [*_OWN, *ConnectorSection.model_fields]
    own: dict[str, str] = {}
    overrides: dict[str, object] = dict(base or {})
    for key, value in extra.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {PREFIX}{near[0]}?" if near else ""
            raise ConfigInvalid(f"There is no setting {key} in kv_connector_extra_config.{hint}")
        if name in _OWN:
            if not isinstance(value, str):
                raise ConfigInvalid(f"{key} must be text; got {type(value).__name__}.")
            own[name] = value
        else:
            overrides[f"connector.{name}"] = value
    if own.get("state_dir"):
        overrides["cluster.state_dir"] = own["state_dir"]
    config: Config = load(overrides=overrides)
    path = own.get("passport_path")
    return ConnectorSettings(
        connector=config.connector,
        state_dir=config.cluster.state_dir,
        master_targets=own.get("master_targets", ""),
        passport_path=Path(path).expanduser() if path else None,
        chat_template=own.get("chat_template", ""),
    )
