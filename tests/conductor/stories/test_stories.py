"""The conductor's policies as stories: where a request goes, what it waits for, when it is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conductor.stories.serving import Serving
from tests.stories import compare, played

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, rewrite: bool) -> None:
    serving = Serving()
    now = asyncio.run(played(path.read_text(encoding="utf-8"), serving))
    serving.end()
    compare(path, now, rewrite=rewrite)
