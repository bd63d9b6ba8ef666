"""docs/parsers.md: every parser that it names is there, and so is the fuzz target or the property that tries it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parsers.md"


def entries() -> list[tuple[list[str], list[str]]]:
    """(files of the parser, what tries it) of each entry."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(
        r"^  - \*parser\*:(.*?)^  - \*tried by\*:(.*?)(?=^- |^\n|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return [(re.findall(r"`([^`]+)`", parsers), re.findall(r"`([^`]+)`", tries)) for parsers, tries in found]


def fed(path: Path) -> set[str]:
    """Names of the tests of a file that hypothesis feeds, or that draw from a seeded generator (C++)."""
    if path.suffix == ".cpp":
        text = path.read_text(encoding="utf-8")
        return (
            set(re.findall(r"^TEST(?:_F)?\(\w+, (\w+)\)", text, re.MULTILINE))
            if "std::mt19937" in text
            else set()
        )
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any("given" in ast.unparse(mark) for mark in node.decorator_list)
    }


def test_every_parser_and_what_tries_it_exist() -> None:
    wrong = []
    assert len(entries()) > 25
    for parsers, tries in entries():
        wrong += [f"{name}: no such file" for name in parsers if not (ROOT / name).is_file()]
        if not tries:
            wrong.append(f"{parsers}: no fuzz target and no property")
        for name in tries:
            path, _, test = name.partition("::")
            if not (ROOT / path).is_file():
                wrong.append(f"{path}: no such file")
            elif test and test not in fed(ROOT / path):
                wrong.append(f"{name}: no test that is fed with drawn input")
            elif not test and not path.startswith("native/fuzz/"):
                wrong.append(f"{name}: names no test")
    assert not wrong, "\n".join(wrong)


def test_every_fuzz_target_is_in_the_list() -> None:
    targets = {path.relative_to(ROOT).as_posix() for path in (ROOT / "native" / "fuzz").glob("*.cpp")}
    assert targets <= {name for _, tries in entries() for name in tries}
