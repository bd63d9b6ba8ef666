"""docs/recovery.md: every row names a test that is there, and what a row says of settings and constants is so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from mooncache.config import Config, load
from tests.test_tidy import files

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "recovery.md"
HEAD = ("row", "fault", "clients see", "at most", "lost", "you do")
PROCESSES = ("Master", "Conductor", "Gateway", "Worker and engine", "Store node", "Holder", "etcd", "Client")
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0}
NO_PROMISE = "Not yet shown by a test"


class Row(NamedTuple):
    """A row of the contract: its section, its cells by their headings, and the tests that stand below its table."""

    section: str
    cells: dict[str, str]
    tests: list[str]

    @property
    def name(self) -> str:
        return self.cells["row"]


def sections(text: str) -> list[tuple[str, str]]:
    """(heading, text below it) in the order of the page."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def rows_of(text: str) -> list[Row]:
    """The rows of all tables of the contract. Fails on a table of another form."""
    found = []
    for heading, body in sections(text):
        if heading == NO_PROMISE:
            continue
        tests = {
            name: re.findall(r"`([^`]+)`", listed)
            for name, listed in re.findall(
                r"^- \*\*([A-Z]\d+)\*\*: (.*(?:\n  .*)*)", body, flags=re.MULTILINE
            )
        }
        table = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in body.splitlines()
            if line.startswith("|")
        ]
        if not table:
            continue
        assert tuple(table[0]) in (HEAD, (*HEAD[:2], "the others see", *HEAD[3:])), table[0]
        for cells in table[2:]:
            assert len(cells) == len(HEAD) and all(cells), cells
            found.append(Row(heading, dict(zip(HEAD, cells, strict=True)), tests.pop(cells[0], [])))
        assert not tests, f"tests of rows that are not there: {sorted(tests)}"
    return found


def rows() -> list[Row]:
    return rows_of(PAGE.read_text(encoding="utf-8"))


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests of a file: functions (Python), Suite.Name (C++)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cpp":
        pairs = re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", text, re.MULTILINE)
        return frozenset(f"{suite}.{name}" for suite, name in pairs)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.parse(text).body if isinstance(node, functions))


def missing(test: str) -> str:
    """What is wrong with the name of a test, "" when it is there. A story is a test as a whole."""
    place, _, name = test.partition("::")
    path = ROOT / place if place.startswith("native/tests/") else ROOT / "tests" / place
    if not path.is_file():
        return f"{place}: no such file"
    if path.suffix == ".txt":
        return "" if path.parent.name == "stories" and not name else f"{test}: no story"
    return "" if name in names_in(path) else f"{test}: no such test"


@cache
def constants() -> dict[str, set[float]]:
    """Every name in the code that is given a number, with all its numbers."""
    found: dict[str, set[float]] = {}
    pattern = re.compile(r"\b(\w+)(?:: [\w\[\], |]+)? =\s*\(?\s*([0-9][0-9_']*(?:\.[0-9]+)?)")
    for path in (*files("services", ".py"), *files("native", ".cpp", ".h")):
        for name, value in pattern.findall(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(number(value))
    return found


def number(text: str) -> float:
    return float(text.replace("_", "").replace("'", ""))


def defaults_s(name: str, config: Config) -> set[float]:
    """What a setting (section.field), a constant or a field of native options is by default, in its own unit."""
    section, _, field = name.partition(".")
    if field:
        value = getattr(getattr(config, section, None), field, None)
        return set() if value is None else {float(value)}
    return constants().get(name, set())


def test_every_row_names_tests_that_are_there() -> None:
    found = rows()
    assert len(found) > 60
    names = [row.name for row in found]
    assert len(set(names)) == len(names), "a row's name means one row"
    wrong = [f"{row.name}: no test" for row in found if not row.tests]
    wrong += [f"{row.name}: {problem}" for row in found for test in row.tests if (problem := missing(test))]
    assert not wrong, "\n".join(wrong)


def test_settings_and_constants_are_what_the_rows_say() -> None:
    config, wrong, count = load(env={}), [], 0
    for row in rows():
        for name, value, unit in re.findall(
            r"`([A-Za-z_][\w.]*)` \((\d+(?:\.\d+)?) (ms|s|min)\)", " ".join(row.cells.values())
        ):
            count += 1
            of_name = "ms" if re.search(r"(?:_ms|_MS|Ms)$", name) else "s"
            said = float(value) * UNITS[unit] / UNITS[of_name]
            if said not in (known := defaults_s(name, config)):
                wrong.append(f"{row.name}: {name} is not {value} {unit} but {sorted(known) or 'nowhere'}")
        for name in re.findall(r"`(_?[A-Z]+_[A-Z_]+|k[A-Z]\w+|[a-z_]+\.[a-z_]+)`", row.cells["at most"]):
            if not defaults_s(name, config):
                wrong.append(f"{row.name}: {name} is nowhere")
    assert count > 30
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("process", PROCESSES)
def test_every_process_has_rows_for_killed_and_stopped(process: str) -> None:
    faults = [row.cells["fault"] for row in rows() if row.section == process]
    for kind in ("worker ", "engine ") if process == "Worker and engine" else ("",):
        for word in ("killed", "stopped"):
            assert any(word in fault and kind in fault for fault in faults), (process, kind, word)


def test_what_is_wrong_is_found() -> None:
    head = "## Disks\n\n| " + " | ".join(HEAD) + " |\n|---|---|---|---|---|---|\n"
    row = "| D1 | full | misses | `master.lease_s` (5 s) | nothing | - |\n"
    (found,) = rows_of(
        f"{head}{row}\n- **D1**: `docs/test_recovery.py::test_what_is_wrong_is_found`,\n  `x.py::y`\n"
    )
    assert found.tests == ["docs/test_recovery.py::test_what_is_wrong_is_found", "x.py::y"]
    assert missing(found.tests[0]) == ""
    assert (
        missing("docs/test_recovery.py::test_nothing") and missing("x.py::y") and missing("native/x.cpp::A.B")
    )
    assert rows_of(f"{head}{row}")[0].tests == [], "a row without a test is a row, and is reported"
    with pytest.raises(AssertionError, match="not there"):
        rows_of(f"{head}{row}\n- **D2**: `x.py::y`\n")
    with pytest.raises(AssertionError):
        rows_of(f"{head}| D1 | full | | 5 s | nothing | - |\n")
    assert defaults_s("master.lease_s", load(env={})) == {5.0}
    assert defaults_s("NO_SUCH_CONSTANT_S", load(env={})) == set()
