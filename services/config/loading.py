"""Reads the configuration: defaults, then the TOML file, then the environment, then overrides (command line).

Between the defaults and the file comes what this machine was given with its cluster: cluster.toml in the state folder,
written by `mooncache join` and `mooncache up --tls`.

Later ones win, value by value, and every value remembers where it came from. A name that does not exist is an
error that tells the nearest one that does: a typo must never silently mean "default".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mooncache.config.accounts_place import BLOT, DatabaseUrl
from mooncache.config.audience import Audience, audience_of
from mooncache.config.base import Section
from mooncache.config.removed import REMOVED
from mooncache.config.schema import CLUSTER_SETTINGS, Config
from mooncache.config.small_files import nearest, read_toml, toml_value
from mooncache.errors import ConfigInvalid

ENV_PREFIX: Final = "MOONCACHE_"
ENV_CONFIG: Final = "MOONCACHE_CONFIG"
ENV_STATE_DIR: Final = "MOONCACHE_STATE_DIR"
# Names that mean something to the build and the tests; they are not settings.
_ENV_FOREIGN: Final = (
    "MOONCACHE_BUILD_",
    "MOONCACHE_TEST_",
    "MOONCACHE_WHEEL",
    "MOONCACHE_SANITIZE",
    "MOONCACHE_ENGINE_INSTANCE",
)
_DEFAULT: Final = "default"
_SECRETS: Final = frozenset({"client.token", "coordination.etcd_password"})


class ExplainedSetting(NamedTuple):
    """One line of `explain`. Values are as TOML would show them; secrets are blotted out."""

    name: str
    value: Any
    source: str
    default: object
    help: str
    audience: Audience

    @property
    def is_default(self) -> bool:
        """Nothing set it: it has its default."""
        return self.source == _DEFAULT


def _fields() -> dict[str, FieldInfo]:
    """Every setting by "section.field"."""
    found = {}
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        found.update({f"{section}.{name}": field for name, field in model.model_fields.items()})
    return found


_FIELDS: Final = _fields()
_ENV_NAMES: Final = {ENV_PREFIX + name.replace(".", "_").upper(): name for name in _FIELDS} | {
    ENV_STATE_DIR: "cluster.state_dir"
}
_REMOVED_ENV_NAMES: Final = {ENV_PREFIX + name.replace(".", "_").upper() for name in REMOVED}


def _unknown(name: str, known: list[str], source: str) -> ConfigInvalid:
    if name in REMOVED or name in _REMOVED_ENV_NAMES:
        return ConfigInvalid(
            f"{name} ({source}) is no longer a setting: Mooncache chooses the value. Delete it."
        )
    advice = nearest(name, known, "`mooncache config explain` lists all settings.")
    return ConfigInvalid(f"There is no setting {name} ({source}); {advice}")


def _from_file(path: Path) -> dict[str, object]:
    tables = read_toml(path, "configuration file", ConfigInvalid)
    values: dict[str, object] = {}
    for section, table in tables.items():
        if section not in Config.model_fields:
            raise _unknown(section, list(Config.model_fields), str(path))
        if not isinstance(table, dict):
            raise ConfigInvalid(f"{section} in {path} has to be a table: [{section}]")
        for field, value in table.items():
            values[f"{section}.{field}"] = value
    return values


def _from_env(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    values: dict[str, tuple[str, str]] = {}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable == ENV_CONFIG or variable.startswith(_ENV_FOREIGN):
            continue
        if variable not in _ENV_NAMES:
            raise _unknown(variable, sorted(_ENV_NAMES), "environment")
        name = _ENV_NAMES[variable]
        if variable == ENV_STATE_DIR and f"{ENV_PREFIX}CLUSTER_STATE_DIR" in env:
            continue
        values[name] = (env[variable], variable)
    return values


def load(
    path: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Read the configuration.

    Args:
        path: TOML file; None means $MOONCACHE_CONFIG, or no file.
        env: environment; None means the process's, and that the state folder's cluster.toml is read as well.
        overrides: {"section.field": value}, for example from the command line; values that are None are skipped.

    Raises ConfigInvalid with a sentence that names the setting, where it was set and what it should be.
    """
    of_this_machine = env is None
    env = os.environ if env is None else env
    chosen = path or env.get(ENV_CONFIG) or None
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if chosen is not None:
        for name, value in _from_file(Path(chosen).expanduser()).items():
            values[name], sources[name] = value, str(chosen)
    for name, (text, variable) in _from_env(env).items():
        values[name], sources[name] = text, f"environment {variable}"
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name], sources[name] = value, "command line"
    if of_this_machine:
        _add_cluster_settings(values, sources)
    return _build(values, sources)


def _add_cluster_settings(values: dict[str, Any], sources: dict[str, str]) -> None:
    """What cluster.toml sets and nothing else does."""
    chosen = values.get("cluster.state_dir") or Config().cluster.state_dir
    try:
        path = Path(str(chosen)).expanduser() / CLUSTER_SETTINGS
        if not path.is_file():
            return
    except (OSError, RuntimeError, ValueError):  # a folder that cannot be is refused where it is used
        return
    for name, value in _from_file(path).items():
        if name == "cluster.state_dir":
            raise ConfigInvalid(f"cluster.state_dir stands in {path}, which is found by it. Delete it there.")
        if name not in values:
            values[name], sources[name] = value, str(path)


def _build(values: dict[str, object], sources: dict[str, str]) -> Config:
    tables: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        if name not in _FIELDS:
            raise _unknown(name, list(_FIELDS), sources[name])
        section, field = name.split(".", 1)
        tables.setdefault(section, {})[field] = value
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigInvalid(_sentence(error, sources)) from None
    config._sources.update(sources)
    return config


def _sentence(error: ValidationError, sources: Mapping[str, str]) -> str:
    """Every wrong setting in one sentence each; the value of a secret never appears."""
    sentences = []
    for problem in error.errors(include_url=False, include_context=False):
        name = ".".join(str(part) for part in problem["loc"][:2])
        reason = problem["msg"].removeprefix("Value error, ")
        given = (
            ""
            if name in _SECRETS or problem["type"] == "value_error"
            else f" (given: {problem['input']!r:.80})"
        )
        where = f", set by {sources[name]}" if name in sources else ""
        sentences.append(f"{name}{where}: {reason}{given}.")
    return " ".join(sentences)


def _plain(value: object) -> object:
    if isinstance(value, (Path, DatabaseUrl)):
        return str(value)
    return list(value) if isinstance(value, tuple) else "" if value is None else value


def explain(config: Config) -> list[ExplainedSetting]:
    """Every setting with its value, source ("default", a file, an environment variable, "command line") and meaning."""
    rows = []
    for name, field in _FIELDS.items():
        section, key = name.split(".", 1)
        value = _plain(getattr(getattr(config, section), key))
        if name in _SECRETS and value:
            value = BLOT
        source = config._sources.get(name, _DEFAULT)
        help_text = field.description or ""
        rows.append(
            ExplainedSetting(name, value, source, _plain(field.default), help_text, audience_of(name))
        )
    return rows


def is_set(config: Config, name: str) -> bool:
    """True when the value was chosen, False when it is the default."""
    return any(row.name == name and not row.is_default for row in explain(config))


def to_toml(config: Config) -> str:
    """The configuration as a commented TOML file that `load` reads back; secrets are left out."""
    lines: list[str] = []
    section = ""
    for row in explain(config):
        if row.name in _SECRETS or BLOT in str(row.value):
            continue
        table, key = row.name.split(".", 1)
        if table != section:
            section = table
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        lines += [
            *(f"# {line.strip()}" for line in row.help.splitlines()),
            f"{key} = {toml_value(row.value)}",
        ]
    return "\n".join(lines) + "\n"
