"""Schemathesis over the gateway's own OpenAPI document: what it promises is what happens."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.stand_in import MODEL, FakeEngine, running

EXAMPLES = 20


@pytest.mark.timeout(400)
async def test_the_document_is_true(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    pytest.importorskip("schemathesis")
    async with running(tmp_path / "state", [FakeEngine("e")]) as bench:
        async with http.get(bench.url + "/openapi.json") as response:
            document = await response.json()
        # Otherwise nearly every example would name a model that does not exist.
        for name in ("ChatCompletionRequest", "CompletionRequest"):
            document["components"]["schemas"][name]["properties"]["model"] = {"enum": [MODEL]}
        path = tmp_path / "openapi.json"
        path.write_text(json.dumps(document))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", bench.url,
            "-H", f"Authorization: Bearer {bench.key()}", "--max-examples", str(EXAMPLES), "--no-color",
            "--generation-deterministic",
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-8000:]
        assert "Tested: 8" in output.decode()
        assert bench.engines["e"].requests, "no example got as far as an engine"
