"""The Python in README and tutorial runs as it stands, against a real pool, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mooncache.cluster.embedded import EmbeddedCluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md"])
def test_python_blocks_run(document: str, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(cluster.state_dir))
    exec(compile("\n".join(blocks), document, "exec"), {"__name__": document})
