"""Cluster descriptions in TOML: `read` gives a checked ClusterSpec, `to_toml` writes one that `read` takes back.

Every field of the dataclasses in cluster.py is a key of the same name; a key that does not exist is an error that
names the nearest one, and a value of the wrong type names the field, the value and what is wanted.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from mooncache.config.small_files import nearest, parse_toml, read_toml, toml_value
from mooncache.errors import ClusterInvalid
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.simulate import profile as profiles
from mooncache.simulate.cluster import (
    ClusterSpec,
    EventKind,
    FirstToken,
    InlineMode,
    InstanceGroup,
    PoolScope,
    Replication,
    RoleSwitching,
    ScheduledEvent,
    Slo,
)

_TABLES: Final[dict[str, type]] = {"slo": Slo, "roles": RoleSwitching, "replication": Replication}
_CHOICES: Final[dict[str, type[StrEnum]]] = {
    kind.__name__: kind for kind in (PoolScope, FirstToken, InlineMode, EventKind, InstanceRole)
}
_LISTS: Final[dict[str, type]] = {"instances": InstanceGroup, "events": ScheduledEvent}
_PLAIN: Final = ("name", "pool", "block_tokens", "first_token")
_TOP: Final = (*_PLAIN, "profile", *_TABLES, *_LISTS)


def read(path: Path | str) -> ClusterSpec:
    """Read and check a cluster description. Raises CLUSTER_INVALID, PROFILE_INVALID or MODEL_TOO_LARGE."""
    where = Path(path).expanduser()
    return _spec(read_toml(where, "cluster description", ClusterInvalid), str(where), where.parent)


def parse(text: str, where: str = "cluster", folder: Path | None = None) -> ClusterSpec:
    """Make a spec of TOML text; `folder` is where profile files are looked for."""
    return _spec(parse_toml(text, where, ClusterInvalid), where, folder)


def _spec(tables: dict[str, Any], where: str, folder: Path | None) -> ClusterSpec:
    for key in tables:
        if key not in _TOP:
            raise _unknown(where, key, _TOP)
    if "instances" not in tables:
        raise ClusterInvalid(
            f"{where}: instances is missing: add at least one [[instances]] with role and count"
        )
    values: dict[str, Any] = {
        key: _value(f"{where}: {key}", ClusterSpec, key, tables[key]) for key in _PLAIN if key in tables
    }
    for key, kind in _TABLES.items():
        if key in tables:
            values[key] = _make(kind, tables[key], f"{where}: {key}", folder)
    for key, kind in _LISTS.items():
        rows = tables.get(key, [])
        if not isinstance(rows, list):
            raise ClusterInvalid(f"{where}: {key} is a list of tables: write [[{key}]]")
        values[key] = tuple(
            _make(kind, row, f"{where}: {key}[{at}]", folder) for at, row in enumerate(rows, start=1)
        )
    if "profile" in tables:
        values["profile"] = _profile(tables["profile"], f"{where}: profile", folder)
    values.setdefault("name", Path(where).stem)
    return ClusterSpec(**values).check()


def _unknown(where: str, key: str, known: tuple[str, ...]) -> ClusterInvalid:
    return ClusterInvalid(f"{where}: there is no field {key}; {nearest(key, known)}")


def _make(kind: type, table: object, where: str, folder: Path | None) -> object:
    if not isinstance(table, dict):
        raise ClusterInvalid(f"{where} is {table!r:.80}: it has to be a table")
    known = tuple(field.name for field in fields(kind))
    values: dict[str, object] = {}
    for key, value in table.items():
        if key not in known:
            raise _unknown(where, key, known)
        if key == "profile":
            values[key] = _profile(value, f"{where}.profile", folder)
        else:
            values[key] = _value(f"{where}.{key}", kind, key, value)
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in values:
            raise ClusterInvalid(f"{where}: {field.name} is missing")
    return kind(**values)


def _value(where: str, kind: type, key: str, value: Any) -> Any:
    """Check a value against the field's annotation, which is a plain type's name."""
    wanted = str(next(field.type for field in fields(kind) if field.name == key)).removesuffix(" | None")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted == "float" and number:
        return float(value)
    if wanted == "int" and number and float(value).is_integer() and math.isfinite(value):
        return int(value)
    if wanted in _CHOICES and isinstance(value, str):
        choices = _CHOICES[wanted]
        return choices(value) if value in set(choices) else value  # `check` refuses another and names these
    if (wanted == "str" and isinstance(value, str)) or (wanted == "bool" and isinstance(value, bool)):
        return value
    words = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false"}
    raise ClusterInvalid(f"{where} is {value!r:.80}: it has to be {words.get(wanted, wanted)}")


def _profile(value: object, where: str, folder: Path | None) -> profiles.ModelProfile:
    """Take a built-in name, a file (ends with .toml), or a table."""
    if isinstance(value, str) and value.endswith(".toml"):
        return profiles.read((folder or Path()) / value)
    if isinstance(value, str):
        return profiles.find(value)
    if isinstance(value, dict):
        return profiles.from_table(value, where)
    raise ClusterInvalid(
        f"{where} is {value!r:.80}: name a built-in profile or a .toml file, or write a table"
    )


def to_toml(spec: ClusterSpec) -> str:
    """A description that `parse` reads back to an equal spec; defaults are left out."""
    lines = [f"{key} = {toml_value(getattr(spec, key))}" for key in _PLAIN]
    built_in = profiles.BUILT_IN.get(spec.profile.name) == spec.profile
    if built_in:
        lines.append(f"profile = {toml_value(spec.profile.name)}")
    else:
        lines += ["", *_profile_lines("profile", spec.profile)]
    for key, kind in _TABLES.items():
        changed = _changed(getattr(spec, key), kind)
        lines += ["", f"[{key}]", *changed] if changed else []
    for key, kind in _LISTS.items():
        for row in getattr(spec, key):
            lines += ["", f"[[{key}]]", *_changed(row, kind)]
            own = getattr(row, "profile", None)
            if own is not None and profiles.BUILT_IN.get(own.name) == own:
                lines.append(f"profile = {toml_value(own.name)}")
            elif own is not None:
                lines += _profile_lines(f"{key}.profile", own)
    return "\n".join(lines) + "\n"


def _changed(row: object, kind: type) -> list[str]:
    found = []
    for field in fields(kind):
        value = getattr(row, field.name)
        if field.name != "profile" and (field.default is MISSING or value != field.default):
            found.append(f"{field.name} = {toml_value(value)}")
    return found


def _profile_lines(name: str, profile: profiles.ModelProfile) -> list[str]:
    table = profiles.to_table(profile)
    plain = [f"{key} = {toml_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    lines = [f"[{name}]", *plain]
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(f"[{name}.{key}]")
            lines += [f"{part} = {toml_value(number)}" for part, number in value.items()]
    return lines
