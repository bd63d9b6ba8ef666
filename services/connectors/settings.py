"""Settings of a connector: `mooncache.*` keys of the engine's extra configuration, over the usual configuration."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from mooncache.config import ConnectorSection
from mooncache.errors import ConfigInvalid

PREFIX = "mooncache."


def own_settings(
    extra: Mapping[str, object],
    own_names: Collection[str],
    where: str,
    used: Collection[str] = frozenset(ConnectorSection.model_fields),
) -> tuple[dict[str, str], dict[str, object]]:
    """(texts of `own_names`, overrides of the section `connector`). Keys of other owners are left alone.

    Args:
        where: what the user wrote them into, for errors.
        used: settings of the section that mean something to this connector.

    Raises:
        ConfigInvalid: an unknown `mooncache.` key, or one of `own_names` that is no text.
    """
    known = [*own_names, *used]
    own: dict[str, str] = {}
    overrides: dict[str, object] = {}
    for key, value in extra.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {PREFIX}{near[0]}?" if near else ""
            raise ConfigInvalid(f"There is no setting {key} in {where}.{hint}")
        if name in own_names:
            if not isinstance(value, str):
                raise ConfigInvalid(f"{key} must be text; got {type(value).__name__}.")
            own[name] = value
        else:
            overrides[f"connector.{name}"] = value
    return own, overrides
