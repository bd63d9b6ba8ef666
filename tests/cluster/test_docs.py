"""What README, tutorial and other pages tell people to type at a running cluster works, in order, on small engines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from tests.docs.blocks import Block, block, changed, environment, run_script

ROOT = Path(__file__).resolve().parents[2]
USUAL = ("http://127.0.0.1:8000/", "~/.mooncache/")


def here(text: str, cluster: EmbeddedCluster) -> str:
    """The pages speak of the usual port and folder; this cluster has its own."""
    for usual, own in zip(USUAL, (f"{cluster.layout.gateway_url}/", f"{cluster.state_dir}/"), strict=True):
        text = text.replace(usual, own)
    return text


def pattern_of(shown: str) -> str:
    """What a page shows, as an expression in which every number may be another one."""
    return r"\s+".join(re.sub(r"\d+", r"\\d+", re.escape(line)) for line in shown.strip().splitlines())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md"])
def test_python_blocks_run(
    document: str,
    serving: EmbeddedCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / document).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 1
    program = "\n".join(blocks)
    assert all(usual in program for usual in USUAL)
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(serving.state_dir))
    exec(compile(here(program, serving), document, "exec"), {"__name__": document})
    sys.stdout.flush()
    shown = re.search(r"^```\n([^`]* tokens, [^`]*)^```", page, re.MULTILINE)
    assert shown
    assert re.search(pattern_of(shown[1]), capsys.readouterr().out)


@pytest.mark.timeout(300)
def test_command_blocks_run(serving: EmbeddedCluster, tmp_path: Path) -> None:
    env = environment(MOONCACHE_STATE_DIR=str(serving.state_dir))
    key = serving.demo_key_path.read_text().strip()

    def run(one: Block, swaps: dict[str, str] | None = None, **more: str) -> str:
        return run_script(here(changed(one.text, swaps or {}), serving), tmp_path, {**env, **more})

    answered = run(block("docs/tutorial.md", "curl http://127.0.0.1:8000"))
    assert '"chat.completion"' in answered
    assert "x-mooncache-decision: " in answered
    request_id = re.search(r"^x-request-id: (\S+)", answered, re.IGNORECASE | re.MULTILINE)
    assert request_id
    explained = run(block("docs/tutorial.md", "mooncache why"), {"REQUEST-ID": request_id[1]})
    assert "decode-1" in explained

    shown = run(block("docs/tutorial.md", "mooncache top"))
    assert shown.count("(q quits)") == 1, "no terminal: one frame"
    assert "prefill-1" in shown

    streamed = run(block("docs/http-api.md", "curl"), {'"MODEL"': '"tiny-model"'}, KEY=key)
    assert streamed.rstrip().endswith("data: [DONE]")

    put = run(block("docs/tutorial.md", "mooncache put"))
    assert "hello" in put
    assert "node-1" in put
    run(block("docs/operations.md", "mooncache instance drain"))
    run_script("mooncache instance role prefill-1 prefill", tmp_path, env)


@pytest.mark.timeout(300)
def test_the_block_that_breaks_an_engine(serving: EmbeddedCluster, tmp_path: Path) -> None:
    """The last one: what it kills is started again, which test_serving.py waits for."""
    env = environment(MOONCACHE_STATE_DIR=str(serving.state_dir))
    rows = {row["instance_id"]: row for row in serving.describe_instances()}
    pid = rows["prefill-1"]["engine_pid"]
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    # Here other engines may run that are no business of this test: only children of this engine's guard are looked at.
    swaps = {"pkill -9 -n": f"pkill -9 -n -P {parent}", "cli.main serve": "hf_engine"}
    run_script(changed(block("docs/tutorial.md", "pkill").text, swaps), tmp_path, env)
    asked = block("docs/tutorial.md", "curl http://127.0.0.1:8000").text
    assert '"chat.completion"' in run_script(here(asked, serving), tmp_path, env)
    assert json.loads(run_script("mooncache status --json", tmp_path, env))["serving"]["instances"]
