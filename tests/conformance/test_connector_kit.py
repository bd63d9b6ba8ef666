"""The kit on connectors of vLLM: ours keeps every promise, and one that knows a prompt by its tokens alone does not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncache.conformance.connector_promises import CONNECTOR_PROMISES
from mooncache.conformance.connector_settings import ConnectorConfig, VllmSettings
from mooncache.conformance.engine_target import EngineSettings
from mooncache.errors import InvalidArgument

EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector"
# Each starts one more engine. tests/connectors/test_vllm_engine.py has other weights, and one engine after another.
ONLY_DEEP = {"other-weights", "fresh-engine"}
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def tried(connector: str, *words: str) -> tuple[int, dict[str, tuple[str, str]]]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mooncache.cli", "conformance", "--connector", connector),
            *("--seed", "7", "--json", "--set", "many=6", *words),
        ],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, {each["name"]: (each["verdict"], each["seen"]) for each in found["promises"]}


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_our_connector_keeps_every_promise(whole: bool) -> None:
    names = {promise.name for promise in CONNECTOR_PROMISES} - (set() if whole else ONLY_DEEP)
    code, verdicts = tried("mooncache", *(word for name in sorted(names) for word in ("--only", name)))
    assert {name: told for name, told in verdicts.items() if told[0] != "pass"} == {}
    assert set(verdicts) == names
    assert code == 0


@needs_vllm
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(900)
def test_a_connector_that_keys_by_tokens_alone_is_found(tmp_path: Path) -> None:
    code, verdicts = tried(
        EXAMPLE,
        *("--set", f"connector.shared_storage_path={tmp_path}"),
        *("--only", "other-weights"),
    )
    assert code == 1
    assert {name: told[0] for name, told in verdicts.items()} == {"other-weights": "fail"}, verdicts


def test_settings_are_told_apart_by_their_names() -> None:
    config = ConnectorConfig.of(
        {"connector.path": "/kv", "env.SIZE": 3, "many": 5, "blocks": 64, "break_command": "kill -STOP 1"}
    )
    assert config.extra == {"path": "/kv"}
    assert config.env == {"SIZE": "3"}
    assert config.questions == EngineSettings(many=5, break_command="kill -STOP 1")
    assert config.vllm == VllmSettings(blocks=64)


@pytest.mark.parametrize(
    ("given", "word"), [({"blcks": 3}, "blcks"), ({"blocks": 0}, "blocks"), ({"many": "x"}, "many")]
)
def test_a_setting_that_is_none_is_refused_by_its_name(given: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        ConnectorConfig.of(given)
