"""The master as stories: how a cluster grows, shrinks, loses its leader, and what it never does."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.testing import virtual_time
from tests.master.stories.cluster import Cluster
from tests.stories import compare, played

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, rewrite: bool) -> None:
    async def run(text: str) -> str:
        cluster = Cluster()
        now = await played(text, cluster)
        await cluster.end()
        return now

    compare(path, virtual_time.run(run(path.read_text(encoding="utf-8")), seed=1), rewrite=rewrite)
