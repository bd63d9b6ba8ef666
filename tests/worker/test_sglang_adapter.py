"""What the adapter gives SGLang, what the launcher makes of it, and what is read from a running server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncache.config import load
from mooncache.connectors.sglang import serve
from mooncache.errors import ConfigInvalid
from mooncache.kvcache.keys import salted
from mooncache.worker import adapters
from mooncache.worker.adapters.sglang import LAUNCHER, SglangAdapter
from mooncache.worker.core import kv_events
from mooncache.worker.core.facts import facts_from_file
from mooncache.worker.core.own_cache import OwnCache
from tests.worker.test_engine_guard import launch


def adapter(**settings: Any) -> SglangAdapter:
    overrides = {f"sglang.{name}": value for name, value in settings.items()}
    found = adapters.make("sglang", load(env={}, overrides=overrides))
    assert isinstance(found, SglangAdapter)
    return found


def value(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_key_is_in_the_environment_alone(tmp_path: Path) -> None:
    command = adapter().command(launch(tmp_path))
    key = command.env["MOONCACHE_ENGINE_API_KEY"]
    assert key
    assert not any(key in argument for argument in command.arguments)
    env = {serve.KEY_VARIABLE: key, "HOME": "/"}
    given = serve.server_arguments(command.arguments[3:], env)
    assert value(tuple(given), "--api-key") == key
    assert serve.KEY_VARIABLE not in env  # children of the server do not inherit it


def test_no_key_no_server() -> None:
    with pytest.raises(ConfigInvalid, match="would serve everyone"):
        serve.server_arguments([], {})


def test_settings_become_arguments(tmp_path: Path) -> None:
    made = adapter(page_tokens=16, max_model_len=4096, max_num_seqs=8, extra_args=("--tp-size", "2"))
    arguments = made.command(launch(tmp_path)).arguments
    assert arguments[1:3] == ("-m", LAUNCHER)
    assert value(arguments, "--page-size") == "16"
    assert value(arguments, "--context-length") == "4096"
    assert value(arguments, "--max-running-requests") == "8"
    assert arguments[-2:] == ("--tp-size", "2")
    assert "--enable-hierarchical-cache" not in arguments
    assert made.max_sequences == 8


def test_hicache_gets_the_pool(tmp_path: Path) -> None:
    arguments = adapter(hicache=True).command(launch(tmp_path)).arguments
    extra = json.loads(value(arguments, "--hicache-storage-backend-extra-config"))
    assert extra["class_name"] == "MooncacheHiCache"
    assert extra["mooncache.state_dir"]
    assert "--enable-hierarchical-cache" in arguments


def test_events_go_to_the_workers_socket(tmp_path: Path) -> None:
    wanted = replace(launch(tmp_path), events_endpoint="ipc:///run/e.ipc", replay_endpoint="ipc:///run/r.ipc")
    config = json.loads(value(adapter().command(wanted).arguments, "--kv-events-config"))
    assert config == {
        "publisher": "zmq",
        "endpoint": "ipc:///run/e.ipc",
        "replay_endpoint": "ipc:///run/r.ipc",
    }
    assert not adapter(kv_events=False).publishes_events
    assert adapter(extra_args=("--dp-size", "1")).publishes_events
    assert not adapter(extra_args=("--dp-size", "2")).publishes_events, "ranks have no sockets with paths"


def test_what_the_server_says_of_itself() -> None:
    models = {"data": [{"id": "m", "max_model_len": 4096}]}
    info = {"version": "0.5.23", "page_size": 64, "max_total_num_tokens": 65536, "max_running_requests": 7}
    facts = adapter().facts(models, info, "")
    assert (facts.engine_version, facts.block_tokens, facts.kv_capacity_tokens) == ("0.5.23", 64, 65536)
    assert (facts.max_model_tokens, facts.max_sequences, facts.pool) == (4096, 7, False)
    assert adapter().facts(None, ["no", "object"], "").engine_version == ""


@pytest.mark.parametrize(
    ("info", "size"),
    [
        ({"tp_size": 4, "pp_size": 2, "dp_size": 3}, (2, 4, 3)),
        # Its ranks divide the requests of one model.
        ({"tp_size": 4, "pp_size": 1, "dp_size": 4, "enable_dp_attention": True}, (1, 4, 1)),
        ({"tp_size": "4"}, (0, 0, 0)),
        (None, (0, 0, 0)),
    ],
)
def test_the_size_of_an_engine_is_that_of_its_server(info: object, size: tuple[int, int, int]) -> None:
    facts = adapter().facts({}, info, "")
    assert (facts.stages, facts.ranks, facts.replicas) == size


def test_the_passport_is_that_of_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncache import tiny_model
    from mooncache.kvcache.passport_file import write_passport

    monkeypatch.setattr(serve, "check_version", lambda: "0.5")
    model = tiny_model.build(tmp_path / "tiny", layers=1)
    given = ["--model-path", str(model), "--page-size", "32", "--tp-size", "2"]
    passport = serve.passport_of(given, tmp_path)
    assert (passport.engine, passport.block_tokens) == ("sglang 0.5", 32)
    assert serve.passport_of([*given, "--kv-cache-dtype", "fp8_e5m2"], tmp_path) != passport
    write_passport(tmp_path / "run" / "passport.json", passport, {"engine_version": "0.5.23", "pool": False})
    facts = facts_from_file((tmp_path / "run" / "passport.json").read_text())
    assert (facts.passport, facts.pool) == (passport, False)


def stored(number: int, parent: int | None, tokens: list[int], salt: str | None) -> dict[str, Any]:
    """An event as SGLang publishes it: one page, the salt with every page of a prompt."""
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": salt,
    }


@pytest.mark.parametrize("salt", [None, "tenant-salt"])
def test_events_of_sglang_become_keys_of_the_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, salt: str | None
) -> None:
    from mooncache import tiny_model

    monkeypatch.setattr(serve, "check_version", lambda: "0.5")
    model = tiny_model.build(tmp_path / "tiny", layers=1)
    passport = serve.passport_of(["--model-path", str(model), "--page-size", "4"], tmp_path)
    batch = [1.0, [stored(-7, None, [1, 2, 3, 4], salt), stored(8, -7, [5, 6, 7, 8], salt)], 0]
    events, invalid = kv_events.decode(msgspec.msgpack.encode(batch))
    assert invalid == 0
    cache = OwnCache(passport)
    cache.apply(events)
    keys = salted(passport, salt or "").chain_keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.keys() == {keys[:32], keys[32:]}
    in_host_memory = {**stored(9, 8, [1, 1, 1, 1], salt), "medium": "CPU_PINNED"}
    cache.apply(kv_events.decode(msgspec.msgpack.encode([1.0, [in_host_memory]]))[0])
    assert len(cache) == 2
