"""The connector for TensorRT-LLM against the engine's interface, on a real pool: which blocks come, what is refused.

Interface only: no code of TensorRT-LLM runs (engine.py says what stands in).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import ConfigInvalid
from tests.client.conftest import make_cluster
from tests.conditions import wait_until
from tests.tensorrt_llm import engine
from tests.tensorrt_llm.engine import BLOCK, Executor, Prompt

_numbers = itertools.count(1)
Start = Callable[..., Executor]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's files: they are the identity of blocks."""
    from mooncache import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny", layers=1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A pool that no test breaks."""
    with make_cluster(tmp_path_factory.mktemp("pool"), nodes=1) as running:
        yield running


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's interface under its name."""
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.3.0" if name == "tensorrt_llm" else version(name)
    )
    for name, module in engine.install().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def start(
    interface: None, cluster: EmbeddedCluster, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts engines; each has a connection of its own to the pool."""
    del interface
    from mooncache.connectors.tensorrt_llm import engine_side

    def build(at: EmbeddedCluster = cluster, *, loads_in_position: bool = False, **more: Any) -> Executor:
        monkeypatch.setenv("MOONCACHE_STATE_DIR", str(at.state_dir))
        package = importlib.import_module("mooncache.connectors.tensorrt_llm")
        given = engine.arguments(**{"model": str(model_dir), **more})
        scheduler, worker = package.MooncacheScheduler(given), package.MooncacheWorker(given)
        found = Executor(scheduler, worker, loads_in_position=loads_in_position)
        wait_until(lambda: worker._side._link.client() is not None, "the engine has a pool")
        return found

    yield build
    engine_side.close_sides()


def prompt(name: str, length: int = 4 * BLOCK + 1, **more: Any) -> Prompt:
    first = zlib.crc32(name.encode())
    tokens = [(first + at * at) % 50_000 for at in range(length)]
    return Prompt(next(_numbers), tokens, **more)


def saved(executor: Executor) -> None:
    """Everything that waits is in the pool."""
    wait_until(lambda: executor.worker._side._waiting_bytes == 0, "the saves end")


@pytest.mark.parametrize("loads_in_position", [False, True])
def test_a_fresh_engine_loads_what_another_computed(start: Start, loads_in_position: bool) -> None:
    first, second = start(), start(loads_in_position=loads_in_position)
    name = f"shared{loads_in_position}"
    assert first.run(prompt(name)) == 0
    saved(first)
    assert second.run(prompt(name)) == 4 * BLOCK
    assert second.run(prompt(name, 4 * BLOCK)) == 3 * BLOCK  # the last token is always computed
    longer = prompt(name, 6 * BLOCK)
    assert second.run(longer) == 4 * BLOCK
    saved(second)
    assert first.run(prompt(name, 6 * BLOCK + 2)) == 6 * BLOCK  # and what the second one computed after it


def test_chunks_and_decoded_tokens_are_saved(start: Start) -> None:
    first, second = start(), start()
    asked = prompt("chunks", 5 * BLOCK + 2)
    assert first.run(asked, chunk=3, decode=2 * BLOCK) == 0
    saved(first)
    again = Prompt(next(_numbers), [*asked.tokens, 1])
    assert second.run(again) == len(asked.tokens) // BLOCK * BLOCK


def test_the_engines_own_blocks_come_first(start: Start) -> None:
    first, second = start(), start()
    first.run(prompt("local"))
    saved(first)
    assert second.run(prompt("local"), local=2 * BLOCK) == 2 * BLOCK
    assert second.scheduler.get_num_new_matched_tokens(prompt("local"), BLOCK + 1) == (0, False)


def test_tenants_do_not_share(start: Start) -> None:
    first, second = start(), start()
    first.run(prompt("salted", cache_salt="a"))
    saved(first)
    assert second.run(prompt("salted", cache_salt="b")) == 0
    assert second.run(prompt("salted")) == 0
    assert second.run(prompt("salted", cache_salt="a")) == 4 * BLOCK


@pytest.mark.parametrize("more", [{"lora_task_id": 3}, {"multimodal_hashes": [[1]]}])
def test_blocks_that_mean_more_than_tokens_are_not_shared(start: Start, more: dict[str, Any]) -> None:
    executor = start()
    name = f"more{next(iter(more))}"
    executor.run(prompt(name, **more))
    saved(executor)
    assert executor.run(prompt(name)) == 0
    saved(executor)
    assert executor.run(prompt(name, **more)) == 0


def test_a_request_whose_salt_is_not_known(start: Start) -> None:
    asked = SimpleNamespace(request_id=next(_numbers), get_tokens=lambda _: prompt("silent").tokens)
    assert start().scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)


def test_a_request_that_ends_before_it_runs_gives_its_blocks_back(start: Start) -> None:
    first = start()
    first.run(prompt("early"))
    saved(first)
    asked = prompt("early")
    assert first.scheduler.get_num_new_matched_tokens(asked, 0) == (4 * BLOCK, False)
    assert len(first.worker._side._staged) == 4
    first.scheduler.update_state_after_alloc(asked, [9, 10, 11, 12, 13])
    first.scheduler.request_finished(asked, [])
    assert not first.worker._side._staged
    first.step(engine.StepOutput())  # and no load of it is left


def test_windows_that_have_passed_end_the_saving(start: Start) -> None:
    executor = start()
    asked = prompt("window")
    executor.scheduler.get_num_new_matched_tokens(asked, 0)
    data = engine.StepData(asked.request_id, asked.tokens, [-1, 5, 6, 7, 8], 0, len(asked.tokens))
    assert not executor.scheduler.build_connector_meta(engine.StepOutput([data])).saves


def test_another_model_has_other_blocks(start: Start, model_dir: Path, tmp_path: Path) -> None:
    from mooncache import tiny_model

    first = start()
    first.run(prompt("model"))
    saved(first)
    other = tiny_model.build(tmp_path / "other", layers=2)
    assert start(model=str(other)).run(prompt("model")) == 0


def test_a_dead_pool_is_computed(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCACHE_CONNECTOR_LOAD_TIMEOUT_S", "1")
    with make_cluster(tmp_path / "fragile", nodes=1) as fragile:
        executor = start(fragile)
        executor.run(prompt("dead"))
        saved(executor)
        assert executor.run(prompt("dead")) == 4 * BLOCK
        fragile.kill("node-1")
        assert executor.run(prompt("dead")) == 0
        executor.worker._side.close()


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size above 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size above 1"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
    ],
)
def test_settings_that_are_refused(start: Start, more: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigInvalid, match=name):
        start(**more)


def test_another_version_is_refused_by_name(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.21.0")
    with pytest.raises(ConfigInvalid, match=r"TensorRT-LLM 0\.21\.0 is not supported"):
        start()


def test_the_home_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncache.connectors.tensorrt_llm.interface import base_class

    for name, module in engine.install("tensorrt_llm._torch.pyexecutor.kv_cache_connector").items():
        monkeypatch.setitem(sys.modules, name, module)
    assert base_class("KvCacheConnectorWorker") is engine.KvCacheConnectorWorker


def test_no_interface_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncache.connectors.tensorrt_llm.interface import base_class

    for name, module in engine.install("tensorrt_llm._torch.pyexecutor.other").items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigInvalid, match="has no KvCacheConnectorWorker"):
        base_class("KvCacheConnectorWorker")
