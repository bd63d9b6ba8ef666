"""ARCHITECTURE.md is true: rooms import from lower floors only, and the walks pass through functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_tidy import SERVICES, files, imported, relative, report

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
# The package's face and names that stay importable for others: they point at rooms, no room lives on them.
FACES = {"__init__", "passport", "_version", "_native"}
STOPS_MAX = 10


def floors() -> list[list[str]]:
    """Rooms as the page draws them, the highest floor first."""
    drawn = re.search(r"imports from lower floors only:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert drawn is not None
    return [line.split() for line in drawn[1].splitlines()]


def room_of(path: Path) -> str:
    return path.relative_to(SERVICES).with_suffix("").parts[0]


def test_rooms_import_from_lower_floors_only() -> None:
    floor = {room: -number for number, rooms in enumerate(floors()) for room in rooms}
    there = {room_of(path) for path in files("services", ".py")} - FACES | {
        "proto"
    }  # generated code is not listed
    assert there == set(floor), "rooms that are not drawn, or not there"
    offenders = []
    for path in files("services", ".py"):
        own = room_of(path)
        for line, module in imported(path) if own not in FACES else ():
            other = module.removeprefix("mooncache.").split(".")[0]
            if (
                module.startswith("mooncache.")
                and other in floor
                and other != own
                and floor[other] >= floor[own]
            ):
                offenders.append(f"{relative(path)}:{line}: {own} imports {other}, which is not below it")
    assert not offenders, report(offenders)


def walks() -> dict[str, list[str]]:
    """Title of each walk and its stops, `path:function`."""
    text = PAGE.split("## Five walks")[1].split("\n## ")[0]
    found = {}
    for part in re.split(r"\n(?=[A-Z][^\n]*:\n\n1\. )", text)[1:]:
        title, _, stops = part.partition(":\n\n")
        assert len(re.findall(r"^\d+\. ", stops, re.MULTILINE)) <= STOPS_MAX, title
        found[title] = re.findall(r"`((?:services|native)/[^`]+:[^`]+)`", stops)
    return found


@cache
def functions(path: Path) -> set[str]:
    """Functions and methods that a Python file defines."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_there_are_five_walks() -> None:
    assert len(walks()) == 5 and all(walks().values())


@pytest.mark.parametrize("stop", [stop for stops in walks().values() for stop in stops])
def test_a_walk_leads_through_what_exists(stop: str) -> None:
    name, _, function = stop.partition(":")
    path = ROOT / name
    if path.suffix == ".py":
        assert function in functions(path)
    else:
        assert re.search(rf"^\S.*\b{re.escape(function)}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
