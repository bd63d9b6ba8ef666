"""Schemathesis against real engines: no request that the document allows makes anything break."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from mooncache.cluster.embedded import EmbeddedCluster

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.timeout(500)
def test_no_server_error(cluster: EmbeddedCluster, key: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    url = cluster.layout.gateway_url
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as response:
        document = json.load(response)
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        schema = document["components"]["schemas"][name]
        schema["required"] += ["max_tokens", "max_completion_tokens"]  # or the model talks until it is full
        fields = schema["properties"]
        fields["model"] = {"enum": [model]}
        fields["max_tokens"] = fields["max_completion_tokens"] = {
            "type": "integer",
            "minimum": 1,
            "maximum": 3,
        }
        fields["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", url, "--checks", CHECKS,
         "-H", f"Authorization: Bearer {key}", "--max-examples", "10", "--no-color", "--phases", "fuzzing",
         "--generation-deterministic", "--request-timeout", "60"],
        cwd=tmp_path, capture_output=True, text=True, timeout=450, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
