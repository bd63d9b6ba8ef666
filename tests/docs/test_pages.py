"""What the pages name exists: commands with their options, settings, environment variables, metrics, events, errors."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

import mooncache
from mooncache import errors
from mooncache.cli.app import build
from mooncache.config import explain, load
from mooncache.runtime import logs
from tests.test_tidy import files

ROOT = Path(__file__).resolve().parents[2]
# Records of what was decided at a time, and tables that programs wrote, speak of what was there then.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
COLUMNS_MAX = 160
FILE_NAMES = {"cluster.json", "cluster.token", "cluster.toml"}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def report(offenders: list[str]) -> str:
    return "\n" + "\n".join(sorted(set(offenders)))


@cache
def sources() -> str:
    """All the code that names metrics."""
    found = (*files("services", ".py"), *files("native", ".cpp", ".h"))
    return "\n".join(path.read_text(encoding="utf-8") for path in found)


def command_lines(text: str) -> list[str]:
    """Every `mooncache ...` that somebody could type, from blocks and from prose."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]
    found = []
    for line in lines:
        bare = re.split(r"\s#\s|\s[|>&]+\s|…|\.\.\.", line)[0].strip()
        match = re.match(r"(?:[A-Z_]+=\S+\s+)*(?:\.venv/bin/)?mooncache (.+)", bare)
        if match and "$(" not in bare:
            found.append(match[1].replace("--json > rows.json", "--json"))
    return found


@pytest.mark.parametrize(
    "page",
    [*PAGES, *sorted((ROOT / "docs").glob("*/*.md"))],
    ids=lambda page: page.name,
)
def test_lines_can_be_read_without_scrolling(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").split("\n"), start=1)
    wide = [f"line {number}: {len(line)} columns" for number, line in lines if len(line) > COLUMNS_MAX]
    assert not wide, report(wide)


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
    offenders = []
    for line in command_lines(page.read_text(encoding="utf-8")):
        try:
            tokens = [token for token in shlex.split(line) if token not in ("[", "]")]
        except ValueError:
            continue  # a piece of prose, not a line
        if problem := unknown(tokens):
            offenders.append(f"mooncache {line}: {problem}")
    assert not offenders, report(offenders)


def unknown(tokens: list[str]) -> str:
    """The first word of a command line that the command tree does not have; "" when all are there."""
    app = build()
    names = []
    for token in tokens:
        if token.startswith("-") or token not in app:
            break
        app = app[token]
        names.append(token)
    if not names:
        return f"no command {tokens[0]!r}"
    if app.default_command is None and len(tokens) > len(names) and not tokens[len(names)].startswith("-"):
        return f"no command {' '.join([*names, tokens[len(names)]])!r}"
    options = [token.partition("=")[0] for token in tokens[len(names) :] if token.startswith("--")]
    if not options:
        return ""
    known = {name for argument in app.assemble_argument_collection() for name in argument.names} | {"--help"}
    return next((f"no option {option}" for option in options if option not in known), "")


def test_the_check_of_commands_finds_what_is_wrong() -> None:
    assert unknown(["up", "--model", "x"]) == ""
    assert unknown(["role", "decode-1", "both"]) == "no command 'role'"
    assert unknown(["instance", "paint", "decode-1"]) == "no command 'instance paint'"
    assert unknown(["status", "--jsn"]) == "no option --jsn"


@cache
def chart_values() -> set[str]:
    """Names of values of the Helm chart, as a page writes them: section and name."""
    values = yaml.safe_load(
        (ROOT / "deploy" / "helm" / "mooncache" / "values.yaml").read_text(encoding="utf-8")
    )
    return {
        f"{section}.{name}" for section, found in values.items() if isinstance(found, dict) for name in found
    }


@pages
def test_settings_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fields = {row.name for row in explain(load())}
    sections = {name.partition(".")[0] for name in fields}
    events = {str(event) for event in logs.Event}
    offenders = []
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?: ?= ?[^`]*)?`", text):
        section, _, field = name.partition(".")
        if section not in sections or name in fields | chart_values() | events | FILE_NAMES:
            continue
        if (section == "client" and hasattr(mooncache.Client, field)) or f'"{name}"' in sources():
            continue  # a method, the name of a span
        offenders.append(name)
    variables = {f"MOONCACHE_{name.replace('.', '_')}".upper() for name in fields}
    for name in re.findall(r"\bMOONCACHE_[A-Z_]+[A-Z]\b", text):
        if name not in variables and name not in sources() and name not in makefiles():
            offenders.append(name)
    assert not offenders, report(offenders)


@cache
def makefiles() -> str:
    folders = (("scripts", ".sh", ".py"), ("tests", ".py"), ("deploy", ".yml", ".py"))
    found = [path for folder, *suffixes in folders for path in files(folder, *suffixes)]
    found += [ROOT / "Makefile", ROOT / "deploy" / "Dockerfile"]
    return "\n".join(path.read_text(encoding="utf-8") for path in found)


@cache
def ends_of_strings() -> frozenset[str]:
    """Of each string in the code its last words, joined by "_", in every number; also without _total and _info."""
    found: set[str] = set()
    for quote, string in set(re.findall(r"([\"']?)(\w+)[\"']", sources())):
        for text in {string, re.sub(r"_(total|info)$", "", string)}:
            words = text.split("_")
            found.update("_".join(words[start:]) for start in range(0 if quote else 1, len(words)))
    return frozenset(found)


@pages
def test_metrics_exist(page: Path) -> None:
    offenders = []
    for name in re.findall(r"\bmooncache_[a-z][a-z0-9_]*[a-z0-9]\b(?!\.)", page.read_text(encoding="utf-8")):
        words = re.sub(r"_(total|bucket|count|sum|info)$", "", name).split("_")[1:]
        tails = ("_".join(words[start:]) for start in range(len(words)))
        if ends_of_strings().isdisjoint(tails):
            offenders.append(name)
    assert not offenders, report(offenders)


@pages
def test_errors_exist(page: Path) -> None:
    catalogue = {kind.name for kind in errors.catalogue()} | {"OK"}
    offenders = []
    for name, code in re.findall(
        r"\b([A-Z]+(?:_[A-Z]+)+)\b[^|\n]{0,3}\((\d{3})\)", page.read_text(encoding="utf-8")
    ):
        found = {kind.code for kind in errors.catalogue() if kind.name == name}
        if found != {int(code)}:
            offenders.append(f"{name} ({code})")
    for name in re.findall(r"\[([A-Z]+(?:_[A-Z]+)+)\]\(reference-errors", page.read_text(encoding="utf-8")):
        if name not in catalogue:
            offenders.append(name)
    assert not offenders, report(offenders)


def test_events_of_the_reference_are_emitted_by_somebody() -> None:
    """A code that no line of the code uses promises something that never comes."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in files("services", ".py"))
    used = set(re.findall(r"\bEvent\.(\w+)", code))
    unused = [str(event) for event in logs.Event if event.name not in used]
    assert not unused, report(unused)
