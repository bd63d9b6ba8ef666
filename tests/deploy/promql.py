"""What a PromQL query refers to: metrics, labels of matchers, labels that it groups by. Enough for our own queries."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STRING = r'"(?:[^"\\]|\\.)*"'
_SELECTOR = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)?\s*\{{((?:{_STRING}|[^}}\"])*)\}}|\b(mooncache_[a-z0-9_]+|up)\b"
)
_MATCHER = re.compile(rf"([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*({_STRING})")
_GROUPING = re.compile(r"\b(by|on|ignoring)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """`name` is a metric's name, or a pattern of names when `pattern`; matchers are (label, operator, value)."""

    name: str
    pattern: bool
    matchers: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class References:
    """`grouped` are the labels of by, on and ignoring."""

    selectors: tuple[Selector, ...]
    grouped: frozenset[str]


def references(query: str) -> References:
    """Everything that has to exist for the query to mean something."""
    grouped = {
        label.strip()
        for _, labels in _GROUPING.findall(query)
        for label in labels.split(",")
        if label.strip()
    }
    bare = _GROUPING.sub(" ", query)
    found = []
    for name, inside, alone in _SELECTOR.findall(bare):
        if alone:
            found.append(Selector(alone, pattern=False, matchers=()))
            continue
        matchers = [(label, op, value[1:-1]) for label, op, value in _MATCHER.findall(inside)]
        names = [value for label, _, value in matchers if label == "__name__"]
        rest = tuple(matcher for matcher in matchers if matcher[0] != "__name__")
        found.append(Selector(names[0] if names else name, pattern=bool(names), matchers=rest))
    return References(tuple(found), frozenset(grouped))


def queries_of_page(text: str) -> list[str]:
    """Queries that a page shows, each as a piece of code between backticks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    pieces = [" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", prose)]
    return [piece for piece in pieces if re.search(r"\bmooncache_[a-z]+_[a-z]|^up\b", piece)]
