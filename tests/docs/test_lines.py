"""Pages fit a terminal: no line of a page of the documentation is longer than `COLUMNS_MAX`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COLUMNS_MAX = 160
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_pages_are_found() -> None:
    assert {"README.md", "ARCHITECTURE.md", "reference-configuration.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_a_page_is_longer_than_a_terminal(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [f"line {number}: {len(line)}" for number, line in enumerate(lines, 1) if len(line) > COLUMNS_MAX]
    assert not long, (
        f"longer than {COLUMNS_MAX} columns: wrap it, or move a table's paragraph below it: {long}"
    )
