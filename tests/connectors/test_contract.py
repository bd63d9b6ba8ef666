"""The connector against vLLM's own interface: signatures, settings, identity, several workers, metrics."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncache.errors import ConfigInvalid
from tests.connectors.harness import BLOCK_TOKENS, LAYERS, WAIT_S, Harness, Make, ask, expected, prompt
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


# --- the interface -----------------------------------------------------------------------------------------------


def test_signatures_fit_the_base_class() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from mooncache.connectors.vllm import MooncacheConnector

    assert issubclass(MooncacheConnector, KVConnectorBase_V1)
    assert issubclass(MooncacheConnector, SupportsHMA)
    assert not getattr(MooncacheConnector, "__abstractmethods__", None)
    for name, mine in vars(MooncacheConnector).items():
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if name.startswith("_") or not callable(theirs):
            continue
        wanted = inspect.signature(theirs)
        given = inspect.signature(getattr(MooncacheConnector, name))
        assert list(wanted.parameters) == list(given.parameters), f"{name}{given} is not {name}{wanted}"
        assert [p.kind for p in wanted.parameters.values()] == [p.kind for p in given.parameters.values()]
        assert inspect.unwrap(mine) is not theirs


def test_the_scheduler_and_the_runner_know_what_we_rely_on() -> None:
    """What is used beyond the base class: it has to be there in the vLLM that is installed."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    assert {"touch", "free_blocks"} <= set(vars(BlockPool))
    fields = SchedulerOutput.__dataclass_fields__
    assert {"kv_connector_block_state", "num_scheduled_tokens", "total_num_scheduled_tokens"} <= set(fields)
    assert {"req_id", "num_computed_tokens"} <= set(NewRequestData.__dataclass_fields__)
    assert {"req_ids", "num_computed_tokens"} <= set(CachedRequestData.__dataclass_fields__)
    assert "kv_connector_worker_meta" in KVConnectorOutput.__dataclass_fields__


def test_vllm_has_no_sockets_with_paths_for_several_ranks() -> None:
    """When it has them, workers can follow the cache events of data parallel engines."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    offset = ZmqEventPublisher.offset_endpoint_port
    assert offset("ipc:///run/events.ipc", 0) == "ipc:///run/events.ipc"
    with pytest.raises(ValueError, match="Invalid endpoint"):
        offset("ipc:///run/events.ipc", 1)


def test_it_is_a_best_effort_cache(make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncache.connectors.vllm import MooncacheConnector

    engine = make()
    assert engine.connector.requires_kv_delivery is False
    assert MooncacheConnector.requires_piecewise_for_cudagraph({}) is False
    assert MooncacheConnector.requires_piecewise_for_cudagraph({"mooncache.layerwise": True}) is True
    assert MooncacheConnector.requires_piecewise_for_cudagraph({"mooncache.layerwise": "nonsense"}) is False
    monkeypatch.setenv("MOONCACHE_CONNECTOR_LAYERWISE", "true")
    assert MooncacheConnector.requires_piecewise_for_cudagraph({}) is True
    assert MooncacheConnector.requires_piecewise_for_cudagraph({"mooncache.layerwise": False}) is False


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"mooncache.load_timeout": 2}, "load_timeout_s"),
        ({"mooncache.load_timeout_s": 0}, "load_timeout_s"),
        ({"mooncache.state_dir": 7}, "must be text"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_the_start(
    make: Make, faulty: FaultyPool, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        make(extra)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "nightly"])
def test_another_version_of_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Where vLLM looks for the class: before anything is imported that such a version may not have."""
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    asked = KVTransferConfig(
        kv_connector="MooncacheConnector",
        kv_connector_module_path="mooncache.connectors.vllm",
        kv_role="kv_both",
    )
    assert KVConnectorFactory.get_connector_class(asked).__name__ == "MooncacheConnector"
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigInvalid, match=rf"vLLM {version} is not supported.*0\.32\.0.*0\.34\.0"):
        KVConnectorFactory.get_connector_class(asked)


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.1.dev12+gabc"])
def test_builds_of_its_versions_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import vllm

    from mooncache.connectors.vllm.engine_passport import check_version

    monkeypatch.setattr(vllm, "__version__", version)
    assert check_version() == version[:4]


def test_an_engine_that_would_answer_garbage_does_not_start(make: Make, faulty: FaultyPool) -> None:
    from mooncache.connectors.vllm.connector import refuse_garbage

    config = make().config
    refuse_garbage(config)
    for kind in ("bfloat16", "int8_per_token_head"):
        config.cache_config.cache_dtype = kind
        with pytest.raises(ConfigInvalid, match=f"garbage with KV of type {kind}"):
            refuse_garbage(config)


def test_the_passport_is_handed_over(make: Make, faulty: FaultyPool, tmp_path: Path) -> None:
    from mooncache.kvcache.keys import passport_from_json

    path = tmp_path / "run" / "passport.json"
    first = make({"mooncache.passport_path": str(path)})
    content = json.loads(path.read_text())
    passport = passport_from_json(json.dumps(content["passport"]))
    assert passport.block_tokens == BLOCK_TOKENS
    assert passport.engine.startswith("vllm-0.")
    assert content["kv_capacity_tokens"] == first.cache.num_blocks * BLOCK_TOKENS
    assert content["kv_bytes_per_token"] == 4 * 2 * 8 * 4
    assert content["max_model_tokens"] == 1024
    assert content["pool"] is True
    assert (content["stages"], content["ranks"]) == (1, 1)
    make({"mooncache.passport_path": str(path)}, blocks=40)
    again = json.loads(path.read_text())
    assert again["passport"] == content["passport"]  # how many blocks there are changes nothing
    make({"mooncache.passport_path": str(path), "mooncache.enabled": False})
    assert json.loads(path.read_text())["pool"] is False


# --- identity and shards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "layout"), [(0, None), (8, "LBHNC"), ("many", None)])
def test_vllm_is_asked_for_heads_before_tokens_where_parts_are_groups_of_heads(
    groups: object, layout: str | None
) -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from mooncache.connectors.vllm import MooncacheConnector

    extra = {"mooncache.head_groups": groups}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    assert MooncacheConnector.get_required_kvcache_layout(config) == layout
    assert layout is None or layout in KVCacheLayout.__members__


def test_other_weights_never_hit(make: Make, faulty: FaultyPool, tmp_path: Path) -> None:
    from mooncache import tiny_model

    tokens = prompt(30, 4 * BLOCK_TOKENS)
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    first = make({"mooncache.passport_path": str(paths[0])})
    first.add("warm", tokens)
    first.run()
    assert faulty.blocks
    other = tiny_model.build(tmp_path / "other", layers=LAYERS, seed=7)
    second = make({"mooncache.passport_path": str(paths[1])}, model=other)
    second.add("r", tokens, ask=ask())
    second.run()
    assert second.reported("r")["outcome"] == "miss"
    mine, theirs = (json.loads(path.read_text())["passport"] for path in paths)
    assert {name for name in mine if mine[name] != theirs[name]} == {"weights_digest"}


def test_what_changes_the_kv_beside_the_models_files_is_in_the_passport(
    make: Make, faulty: FaultyPool, tmp_path: Path
) -> None:
    """LongRoPE's frequencies follow the engine's longest prompt; a configuration may come from another folder."""
    from mooncache.connectors.vllm.engine_passport import read_passport

    engine = make()
    model = engine.config.model_config

    def digest() -> str:
        state_dir = tmp_path / "state"
        return read_passport(engine.config, {}, "float32", 10, state_dir, block_tokens=32).config_digest

    plain = digest()
    model.max_model_len //= 2
    assert digest() == plain  # the positions of other models do not move
    model.hf_text_config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    short = digest()
    model.max_model_len *= 2
    assert len({plain, short, digest()}) == 3
    here = digest()
    folder = tmp_path / "configuration"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 5e5}')
    model.hf_config_path = str(folder)
    assert digest() != here
    model.trust_remote_code = True
    copy = tmp_path / "copy"
    shutil.copytree(model.model, copy)
    model.model = str(copy)
    trusting = digest()
    (copy / "modeling_mine.py").write_text("SCALE = 2")
    assert digest() != trusting
    engine.config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    skipping = digest()
    engine.config.cache_config.kv_cache_dtype_skip_layers = ["1"]
    assert digest() != skipping


def test_a_model_whose_files_are_gone_serves_without_the_pool(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncache.connectors.vllm import worker_side

    def refuse(*_: Any) -> Any:
        raise ConfigInvalid("no weight files")

    monkeypatch.setattr(worker_side, "read_passports", refuse)
    engine = make()
    tokens = prompt(31, 100)
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.reported("r")["outcome"] == "off"
    assert faulty.calls == []


def test_reports_of_several_workers_are_merged() -> None:
    from mooncache.connectors.vllm.messages import LoadEnd, SaveEnd, StepReport
    from mooncache.kvcache.transfers import MoveFailure

    one = StepReport({"a": LoadEnd(3, 30, 0.1, MoveFailure.NONE)}, {"s": SaveEnd(frozenset({0, 1}))})
    two = StepReport(
        {"a": LoadEnd(1, 10, 0.3, MoveFailure.MISSING), "b": LoadEnd(2, 20, 0.1, MoveFailure.NONE)},
        {"s": SaveEnd(frozenset({1, 2}))},
    )
    both = one.aggregate(two)
    assert both.loads == {
        "a": LoadEnd(1, 40, 0.3, MoveFailure.MISSING, 2),
        "b": LoadEnd(2, 20, 0.1, MoveFailure.NONE),
    }
    assert both.saves == {"s": SaveEnd(frozenset({1}), 2)}
    assert one.saves["s"].shards == 1  # what was given is left as it was


def two_shards(engine: Harness) -> Any:
    """The engine's scheduler side, as if there were two workers."""
    from mooncache.kvcache.keys import passport_from_json, passport_to_json

    given = engine.worker.get_handshake_metadata()
    passport = passport_from_json(*given.passports)
    side = engine.connector._scheduler
    side.handshake(
        [
            dataclasses.replace(
                given, passports=(passport_to_json(dataclasses.replace(passport, tp_rank=rank, tp_size=2)),)
            )
            for rank in range(2)
        ]
    )
    return side


def test_a_load_of_two_shards_ends_with_the_second(make: Make, faulty: FaultyPool) -> None:
    from mooncache.connectors.vllm.core.chain import KeyChain
    from mooncache.connectors.vllm.core.groups import BlockRange
    from mooncache.connectors.vllm.messages import LoadEnd, StepReport
    from mooncache.kvcache.transfers import MoveFailure

    engine = make()
    side = two_shards(engine)
    tokens = prompt(33, 2 * BLOCK_TOKENS + 1)
    chain = KeyChain.begin(side._book._passports, tokens)
    faulty.blocks = {key: b"" for part in chain.packed(BlockRange(0, 0, 2)) for key in (part[:32], part[32:])}
    request = engine.add("r", tokens, ask=ask())
    assert side.matched(request, 0) == (None, False)
    while side._lookups.pending:
        assert side._changed.wait(WAIT_S)
    assert side.matched(request, 0) == (2 * BLOCK_TOKENS, True)
    side._book.allocated("r", [range(1, 4)], 2 * BLOCK_TOKENS)
    side.reported(StepReport({"r": LoadEnd(2, 10, 0.1, MoveFailure.NONE)}, {}))
    assert side._book.is_loading("r")
    side.reported(StepReport({"r": LoadEnd(1, 5, 0.2, MoveFailure.MISSING)}, {}))
    assert not side._book.is_loading("r")
    heard = side._book.cache_report("r")
    assert (heard.loaded_tokens, heard.loaded_bytes, heard.failed_blocks) == (BLOCK_TOKENS, 15, 1)


def test_a_save_of_two_shards_ends_with_the_second(make: Make, faulty: FaultyPool) -> None:
    from vllm.v1.request import RequestStatus

    from mooncache.connectors.vllm.messages import SaveEnd, StepReport

    engine = make()
    side = two_shards(engine)
    request = engine.add("r", prompt(32, 2 * BLOCK_TOKENS))
    side.matched(request, 0)
    engine.run_until(lambda: side._lookups.pending == 0)
    output = engine.scheduler.schedule()
    (save,) = output.kv_connector_metadata.saves
    assert [len(keys) for keys in save.keys] == [64, 64]
    assert save.keys[0] != save.keys[1]
    side.reported(StepReport({}, {save.name: SaveEnd(frozenset({0, 1}))}))
    assert side.saves_under_way
    side.reported(StepReport({}, {save.name: SaveEnd(frozenset({0}))}))
    assert not side.saves_under_way
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)


# --- metrics -----------------------------------------------------------------------------------------------------


def test_bytes_by_path_are_counted_and_shards_add_up() -> None:
    from mooncache.connectors.vllm.messages import LoadEnd, merge_loads
    from mooncache.connectors.vllm.stats import ConnectorStats
    from mooncache.kvcache.transfers import MoveFailure

    stats = ConnectorStats()
    stats.count_path("load_path_bytes", 100, 30)
    stats.count_path("load_path_bytes", 50, 0)
    stats.count_path("save_path_bytes", 7, 7)
    assert stats.data["count"] == {
        "load_path_bytes:in_place": 120,
        "load_path_bytes:staged": 30,
        "save_path_bytes:staged": 7,
    }
    one, other = (LoadEnd(4, 100, 0.1, MoveFailure.NONE, staged_bytes=staged) for staged in (100, 20))
    assert merge_loads(one, other).staged_bytes == 120


def test_metrics_appear_in_vllms_registry(make: Make, faulty: FaultyPool) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

    from mooncache.connectors.vllm import MooncacheConnector
    from mooncache.connectors.vllm.stats import ConnectorStats

    engine = make()
    kinds: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = MooncacheConnector.build_prom_metrics(
        engine.config, kinds, ["model_name", "engine"], {0: ["m", "0"]}
    )
    try:
        stats = ConnectorStats()
        stats.count("loaded_bytes", 100)
        stats.count("load_failures", 2, "checksum")
        stats.seen("load_seconds", 0.02)
        stats.gauge("pool_up", 1)
        other = MooncacheConnector.build_kv_connector_stats(
            {"count": {"loaded_bytes": 11}, "seen": {"load_seconds": [3.0]}, "gauge": {"pool_up": 0}}
        )
        stats.aggregate(other)
        metrics.observe(json.loads(json.dumps(stats.to_dict())), 0)
        text = generate_latest(REGISTRY).decode()
        labels = '{engine="0",model_name="m"}'
        assert f"mooncache_connector_loaded_bytes_total{labels} 111.0" in text
        assert (
            'mooncache_connector_load_failures_total{engine="0",model_name="m",reason="checksum"} 2.0' in text
        )
        assert f"mooncache_connector_load_seconds_count{labels} 2.0" in text
        assert f"mooncache_connector_pool_up{labels} 0.0" in text
        assert stats.reduce()["loaded_bytes"] == 111
        stats.reset()
        assert stats.is_empty()
    finally:
        made = (*metrics._counters.values(), *metrics._histograms.values(), *metrics._gauges.values())
        for metric in made:
            REGISTRY.unregister(metric)
