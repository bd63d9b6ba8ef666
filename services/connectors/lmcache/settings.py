"""Settings of the plug-ins: `mooncache.*` keys of LMCache's extra configuration, over the usual ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncache.config import Config, ConnectorSection, load
from mooncache.connectors.settings import PREFIX, own_settings
from mooncache.errors import ConfigInvalid

IN_EXTRA: Final = "LMCache's extra_config"
IN_PARAMS: Final = "adapter_params of the L2 adapter"
_OWN: Final = ("state_dir", "master_targets", "variant")
_USED: Final = ("enabled", "load_timeout_s", "save_timeout_s", "load_threads", "registered_bytes_max")
_MODELS: Final = f"{PREFIX}models"


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """What a plug-in is given beside LMCache's own configuration."""

    connector: ConnectorSection
    state_dir: Path
    master_targets: str  # "" takes the configured
    models: Mapping[str, str]  # folder of a model, by LMCache's name for it
    variant: str  # what else changes the KV, in the operator's words


def read_settings(extra: Mapping[str, Any] | None, where: str) -> PluginSettings:
    """From what LMCache passes on. Keys of others are left alone in extra_config; adapter_params are all ours.

    Raises:
        ConfigInvalid: an unknown key, or a value that cannot be used.
    """
    given = dict(extra or {})
    models = _models(given.pop(_MODELS, None), where)
    if where == IN_PARAMS:
        for key in given:
            if not key.startswith(PREFIX):
                raise ConfigInvalid(
                    f"There is no setting {key} in {where}: those of mooncache begin with {PREFIX}"
                )
    own, overrides = own_settings(given, (*_OWN, "models"), where, _USED)
    if own.get("state_dir"):
        overrides["cluster.state_dir"] = own["state_dir"]
    config: Config = load(overrides=overrides)
    return PluginSettings(
        connector=config.connector,
        state_dir=config.cluster.state_dir,
        master_targets=own.get("master_targets", ""),
        models=models,
        variant=own.get("variant", ""),
    )


def _models(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(folder, str) and folder for name, folder in value.items()
    ):
        raise ConfigInvalid(f'{_MODELS} in {where} must be an object like {{"name": "/folder"}}.')
    return dict(value)
