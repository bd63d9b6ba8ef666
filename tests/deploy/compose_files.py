"""The Compose files as a test reads them: with overlays merged by Compose's rules, and variables replaced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MAIN = DEPLOY / "docker-compose.yml"
OVERLAYS = {path.stem: path for path in sorted((DEPLOY / "compose").glob("*.yml"))}
VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z0-9_]+):-([^}]*)\}")
_REPLACED = {"command", "entrypoint", "test"}  # lists that an overlay replaces; others grow


def merged(*overlays: str) -> dict[str, Any]:
    """deploy/docker-compose.yml with these overlays, every variable at its default. Skips without PyYAML."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the Compose files")
    whole: dict[str, Any] = {}
    for path in (MAIN, *(OVERLAYS[name] for name in overlays)):
        whole = _merge(whole, _replaced(yaml.safe_load(path.read_text(encoding="utf-8"))))
    return {name: value for name, value in whole.items() if not name.startswith("x-")}


def _replaced(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replaced(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one) for one in value]
    return VARIABLE.sub(lambda match: match[2], value) if isinstance(value, str) else value


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = _merge(result[name], value)
        elif isinstance(value, list) and isinstance(result.get(name), list) and name not in _REPLACED:
            result[name] = [*result[name], *value]
        else:
            result[name] = value
    return result
