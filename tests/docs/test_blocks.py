"""Every command block of the pages runs in a test or says why it cannot (registry.py); most of them run here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import missing_modules
from tests.docs.blocks import (
    ROOT,
    Block,
    all_blocks,
    block,
    changed,
    environment,
    open_terminal,
    run_script,
    terminals,
)
from tests.docs.registry import REGISTRY, By, Cannot, Runs
from tests.ports import own_port

pytestmark = pytest.mark.timeout(300)
ALONE = [name for name, plan in REGISTRY.items() if isinstance(plan, Runs)]
small_engine = pytest.mark.skipif(
    bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
)


def entries_of(one: Block) -> list[tuple[str, str]]:
    return [name for name in REGISTRY if name[0] == one.page and one.first.startswith(name[1])]


def test_every_block_has_an_entry() -> None:
    wrong = [
        f"{one.page}: {len(entries_of(one))} entries for the block that begins with {one.first[:60]!r}"
        for one in all_blocks()
        if len(entries_of(one)) != 1
    ]
    assert not wrong, "\n".join(["tests/docs/registry.py:", *wrong])


@pytest.mark.parametrize(("page", "begins"), REGISTRY, ids=map(str, REGISTRY))
def test_every_entry_is_true(page: str, begins: str) -> None:
    """Its block is there, and the tests that it names are there, and take the block from the page."""
    block(page, begins)
    plan = REGISTRY[page, begins]
    named = (plan.test,) if isinstance(plan, By) else plan.instead if isinstance(plan, Cannot) else ()
    for test in named:
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, test
        if isinstance(plan, By):
            words = re.sub(r"\s+", " ", begins.replace("\n", "\\n"))
            source = re.sub(r"\s+", " ", source.replace("block(PAGE,", f'block("{page}",'))
            taken = f'"{page}", "{words}' in source
            assert taken, f"{test} does not take the block from the page"


def test_the_search_finds_blocks_of_all_kinds(tmp_path: Path) -> None:
    one = Block("x.md", "sh", "# first this\nmooncache put a b \\\n  --tenant t   # note\nexport A=1\n")
    assert one.first.startswith("mooncache put a b")
    assert one.commands() == ["mooncache put a b --tenant t", "export A=1"]
    assert run_script(changed("echo moon", {"moon": "sun"}), tmp_path, os.environ) == "sun\n"
    with pytest.raises(AssertionError, match="does not say"):
        changed("echo moon", {"mars": "sun"})
    with pytest.raises(AssertionError, match="exit 3"):
        run_script("echo before; exit 3", tmp_path, os.environ)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages speak of: traces, a cluster's description, hardware with prices."""
    made = tmp_path_factory.mktemp("blocks")
    run_script(
        "mooncache trace generate mine.jsonl --requests 300 --rate 5\n"
        "for name in day trace gateway-1; do cp mine.jsonl $name.jsonl; done\n"
        "mooncache plan --example > hardware.toml",
        made,
        environment(MOONCACHE_STATE_DIR=str(made / "state")),
    )
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    cluster = re.search(r"^```toml\n(name = .*?)^```", page, re.DOTALL | re.MULTILINE)
    assert cluster
    (made / "my.toml").write_text(cluster[1])
    return made


@pytest.mark.parametrize(("page", "begins"), ALONE, ids=map(str, ALONE))
def test_blocks_that_need_no_cluster(page: str, begins: str, folder: Path) -> None:
    plan = REGISTRY[page, begins]
    assert isinstance(plan, Runs)
    commands = block(page, begins).commands()
    for start in plan.left_out:
        assert any(command.startswith(start) for command in commands), start
    kept = [command for command in commands if not command.startswith(tuple(plan.left_out))]
    text = changed("\n".join(kept), plan.swaps)
    printed = run_script(text, folder, environment(MOONCACHE_STATE_DIR=str(folder / "state")))
    for pattern in plan.prints:
        assert re.search(pattern, printed), f"no {pattern!r} in:\n{printed}"


def test_make_blocks() -> None:
    """CI runs them in the page's order before anything else; here make says what it would do."""
    readme, tutorial = block("README.md", "make up"), block("docs/tutorial.md", "make up")
    assert readme.commands() == ["make up", "make test"]
    assert tutorial.commands() == ["make up"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^make up UP_ARGS=.*^make test$", ci, re.DOTALL | re.MULTILINE)
    for command, ends in (("make up", "mooncache up"), ("make test", "all tests passed")):
        would = subprocess.run(
            [*shlex.split(command), "--dry-run"],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ends in would.stdout, would.stdout


def shape(text: str) -> list[str]:
    """The lines with what differs between two runs taken out: numbers, widths, folders, the engine."""
    text = re.sub(r"(vllm|hf) [\d.]+", "ENGINE", text)
    text = re.sub(r"\d+(\.\d+)*", "N", text)
    text = re.sub(r"\S*/(demo\.key|mooncache )", r"\1", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_what_up_prints() -> None:
    """The README shows what `mooncache up` prints, shortened at one place."""
    from mooncache.cli import announce
    from mooncache.reporting.output import console

    shown = block("README.md", "✓ master").text
    instances = [
        {
            "instance_id": f"{role}-1",
            "pid": 1,
            "role": role,
            "engine": "vllm 0.32.0",
            "pool": True,
            "url": "http://127.0.0.1:1",
        }
        for role in ("prefill", "decode")
    ]
    document: dict[str, Any] = {
        "master_targets": ["127.0.0.1:7700"],
        "state_dir": str(Path("~/.mooncache").expanduser()),
        "token_file": str(Path("~/.mooncache/cluster.token").expanduser()),
        "pid": 1,
        "master_pid": 2,
        "nodes": [
            {
                "node_id": "node-1",
                "pid": 3,
                "grpc_target": "",
                "tcp": "127.0.0.1:9",
                "capacity_bytes": 1 << 30,
                "ssd_bytes": 0,
            }
        ],
        "serving": {
            "base_url": "http://127.0.0.1:8000/v1",
            "gateway_pid": 4,
            "conductor_target": "127.0.0.1:7800",
            "conductor_pid": 5,
            "conductors": {"127.0.0.1:7800": 5},
            "ca_file": "",
            "api_key_file": str(Path("~/.mooncache/demo.key").expanduser()),
            "tenant": "demo",
            "model": "tiny-model",
            "random_weights": True,
            "instances": instances,
        },
    }
    with console.capture() as captured:
        announce.show(document, token_created=False)
    printed = shape(captured.get())
    missing = [
        line for line in shape(shown) if line not in printed and not line.startswith("✓") and line != "..."
    ]
    assert not missing, f"not printed any more: {missing}\n" + "\n".join(printed)


def test_a_pool_alone(tmp_path: Path) -> None:
    """vLLM by its own environment's pip (the extra is there), the pool as the page says."""
    install, up = block("docs/vllm-connector.md", "pip install").commands()
    extra = re.fullmatch(r'pip install "\.\[(\w+)\]"', install)
    assert extra
    assert re.search(rf"^{extra[1]} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), extra[1]
    assert (ROOT / "scripts" / "install_vllm.sh").exists()
    env = environment(MOONCACHE_STATE_DIR=str(tmp_path))
    with terminals() as opened:
        pool = open_terminal(opened, f"{up} --capacity 32MiB", tmp_path, env)
        pool.wait_for("Ctrl-C stops everything.")
        assert run_script("mooncache put greeting hello && mooncache get greeting", tmp_path, env).endswith(
            "hello"
        )
        assert pool.ctrl_c() == 0


def test_a_pool_by_hand(tmp_path: Path) -> None:
    """A master and two nodes, each by itself, and one more whose memory is a file."""
    port = own_port()
    target = f"127.0.0.1:{port}"
    env = environment(
        MOONCACHE_STATE_DIR=str(tmp_path / "state"),
        MOONCACHE_MASTER_PORT=str(port),
        MOONCACHE_CLUSTER_MASTER_TARGETS=target,
    )
    swaps = {"64GiB": "64MiB", "/mnt/pmem/arena": str(tmp_path / "arena"), "10.0.0.5:7700": target}
    make, with_file = changed(block("docs/operations.md", "fallocate").text, swaps).splitlines()
    with terminals() as opened:
        for command in block("docs/tutorial.md", "mooncache master\n").commands():
            open_terminal(
                opened, changed(command, {"256MiB": "32MiB"} if "256MiB" in command else {}), tmp_path, env
            )
            opened[-1].wait_for('"service.ready"')
        run_script(make, tmp_path, env)
        open_terminal(opened, with_file, tmp_path, env).wait_for('"service.ready"')
        assert '"arena_opened"' in opened[-1].said() or "node.arena" in opened[-1].said()
        status = f"mooncache status --json --master {target}"
        nodes: list[dict[str, Any]] = []
        for _ in range(50):
            nodes = json.loads(run_script(status, tmp_path, env))["nodes"]
            if len(nodes) == 3:
                break
        assert {"a", "b"} < {node["node_id"] for node in nodes}
        assert {terminal.ctrl_c() for terminal in reversed(opened)} == {0}


@small_engine
def test_an_engine_by_itself(tmp_path: Path) -> None:
    port = str(own_port())
    swaps = {"/tmp/tiny": str(tmp_path / "tiny"), "8001": port}
    text = block("docs/custom-engine.md", "python -m mooncache.tiny_model")
    make, serve, ask = [
        changed(command, {old: new for old, new in swaps.items() if old in command})
        for command in text.commands()
    ]
    env = environment(MOONCACHE_STATE_DIR=str(tmp_path))
    with terminals() as opened:
        run_script(make, tmp_path, env)
        open_terminal(opened, serve, tmp_path, env).wait_for('"service.ready"')
        answer = json.loads(run_script(ask, tmp_path, env))
        assert answer["usage"]["completion_tokens"] == 8
        assert opened[0].ctrl_c() == 0


@small_engine
def test_an_engine_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's program as it stands, against a pool: the second request loads what the first one computed."""
    from mooncache import tiny_model

    page = (ROOT / "docs" / "custom-engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = re.search(r"^```\n(first: .*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4 and shown
    program = changed("\n".join(blocks), {"/tmp/tiny": str(tiny_model.build(tmp_path / "tiny"))})
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(tmp_path))
    names: dict[str, Any] = {"__name__": "custom_engine"}
    monkeypatch.setitem(sys.modules, "custom_engine", ModuleType("custom_engine"))
    with EmbeddedCluster(ClusterSettings(state_dir=tmp_path, nodes=1, capacity_bytes=64 << 20, port=0)):
        exec(compile(program, "docs/custom-engine.md", "exec"), names)
    assert capsys.readouterr().out == shown[1]
    kv = names["kv"]
    assert kv[:6].flatten(1).amin(1).tolist() == [1, 2, 3, 4, 5, 6] == kv[32:38].flatten(1).amax(1).tolist()


@small_engine
def test_workers(tmp_path: Path) -> None:
    """Both lines, with the small engine: the second one makes the model that the first one then starts with."""
    by_model, by_variable = block("docs/worker.md", "mooncache worker --model").commands()
    env = environment(MOONCACHE_STATE_DIR=str(tmp_path), MOONCACHE_WORKER_ENGINE="hf")
    made = tmp_path / "models" / "tiny-model"
    by_model = changed(by_model, {"~/models/Qwen3-8B": str(made)})
    for command, event in ((by_variable, "worker.engine_ready"), (by_model, "worker.engine_started")):
        with terminals() as opened:
            open_terminal(opened, command, tmp_path, env).wait_for(f'"{event}"')
            assert opened[0].ctrl_c() == 0
