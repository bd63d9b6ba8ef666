"""A link within the pages leads to a heading that is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages

PAGES = pages()
LINK = re.compile(r"\]\(([^)\s#:]*)#([^)\s]+)\)")


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading's text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    found: set[str] = set()
    code = False
    for line in page.read_text(encoding="utf-8").splitlines():
        code ^= line.startswith("```")
        heading = re.match(r"#{1,6} (.*)", line)
        if heading and not code:
            text = anchor(heading[1])
            again = sum(1 for name in found if re.fullmatch(rf"{re.escape(text)}(-\d+)?", name))
            found.add(f"{text}-{again}" if again else text)
    return found


def broken(page: Path, text: str) -> list[str]:
    """Links to headings that are not there."""
    wrong = []
    for name, wanted in LINK.findall(text):
        target = (page.parent / name).resolve() if name else page
        if target.suffix == ".md" and not (target.is_file() and wanted in anchors(target)):
            wrong.append(f"{name}#{wanted}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_the_check_finds_what_is_wrong() -> None:
    page = ROOT / "docs" / "engines.md"
    assert "nixl" in anchors(page)
    text = "[a](#nixl) [b](#nowhere) [c](vllm-connector.md#start) [d](no-page.md#start) [e](https://x.example/#y)"
    assert broken(page, text) == ["#nowhere", "no-page.md#start"]
