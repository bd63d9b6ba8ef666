"""The Python in README and tutorial runs as it stands, in order, against a real cluster with small engines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mooncache.cluster.embedded import EmbeddedCluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md"])
def test_python_blocks_run(document: str, serving: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 1
    program = "\n".join(blocks)
    # The pages speak of the usual port and folder; this cluster has its own.
    assert "http://127.0.0.1:8000/" in program
    assert "~/.mooncache/" in program
    program = program.replace("http://127.0.0.1:8000/", f"{serving.layout.gateway_url}/")
    program = program.replace("~/.mooncache/", f"{serving.state_dir}/")
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(serving.state_dir))
    exec(compile(program, document, "exec"), {"__name__": document})
    sys.stdout.flush()
