"""What the parts of a one-machine cluster are told, without starting any."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster import layout as layouts
from mooncache.cluster import settings as cluster_settings
from mooncache.cluster.layout import ClusterLayout, plan
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import RUN_VARIABLE
from mooncache.cluster.settings import ClusterSettings, choose_engine, resolve_model
from mooncache.config import load
from mooncache.errors import ConfigInvalid, InvalidArgument


def make(folder: Path, env: dict[str, str] | None = None, **settings: Any) -> ClusterLayout:
    chosen = ClusterSettings(
        state_dir=folder, **{"port": 0, "conductor_port": 0, "gateway_port": 0, **settings}
    )
    with PortPicker(chosen.host) as ports:
        return plan(chosen, load(env=env or {}), folder, folder / "run", "a run", ports)


def test_a_pool_alone(tmp_path: Path) -> None:
    found = make(tmp_path)
    assert list(found.parts) == ["master", "node-1", "node-2"]
    assert (found.conductor_target, found.gateway_url) == ("", "")
    assert all("CONDUCTOR" not in name for part in found.parts.values() for name in part.env)


def test_everything(tmp_path: Path) -> None:
    found = make(tmp_path, engine="hf", prefill=2, decode=1, model="/m", model_name="m")
    assert list(found.parts) == [
        "master",
        "node-1",
        "conductor",
        "gateway",
        "prefill-1",
        "prefill-2",
        "decode-1",
    ]
    for name, part in found.parts.items():
        assert part.env[RUN_VARIABLE] == "a run"
        assert part.env["MOONCACHE_CLUSTER_MASTER_TARGETS"] == found.master_target
        assert part.env["MOONCACHE_CLUSTER_CONDUCTOR_TARGET"] == found.conductor_target
        assert part.log_path == tmp_path / "logs" / f"{name}.log"
    worker = found.parts["prefill-2"].env
    assert worker["MOONCACHE_WORKER_INSTANCE_ID"] == "prefill-2"
    assert worker["MOONCACHE_WORKER_ROLE"] == "prefill"
    assert worker["MOONCACHE_WORKER_ENGINE"] == "hf"
    assert (worker["MOONCACHE_WORKER_MODEL"], worker["MOONCACHE_WORKER_MODEL_NAME"]) == ("/m", "m")
    assert found.parts["decode-1"].env["MOONCACHE_WORKER_ROLE"] == "decode"
    assert found.gateway_url == f"http://{found.parts['gateway'].control}"


def test_every_port_is_another_one(tmp_path: Path) -> None:
    found = make(tmp_path, engine="hf", prefill=3, decode=3, nodes=3)
    addresses = [
        address for part in found.parts.values() for address in (part.control, part.metrics) if address
    ]
    assert len(set(addresses)) == len(addresses) == 2 * len(found.parts)


def test_every_setting_is_known(tmp_path: Path) -> None:
    """A misspelt setting would end the part at its start."""
    found = make(tmp_path, engine="vllm")
    for part in found.parts.values():
        load(env=dict(part.env))


def test_without_prefill_engines_decode_does_both(tmp_path: Path) -> None:
    found = make(tmp_path, engine="hf", prefill=0, decode=2)
    roles = {name: part.env.get("MOONCACHE_WORKER_ROLE") for name, part in found.parts.items()}
    assert {name: role for name, role in roles.items() if role} == {"decode-1": "both", "decode-2": "both"}


def test_what_the_user_chose_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "gpu_count", lambda: 0)
    plain = make(tmp_path, engine="vllm").parts["decode-1"].env
    assert plain["MOONCACHE_VLLM_DTYPE"] == "float32"
    assert plain["MOONCACHE_VLLM_ENFORCE_EAGER"] == "true"
    chosen = make(tmp_path, {"MOONCACHE_VLLM_DTYPE": "bfloat16"}, engine="vllm").parts["decode-1"].env
    assert "MOONCACHE_VLLM_DTYPE" not in chosen
    assert chosen["MOONCACHE_VLLM_ENFORCE_EAGER"] == "true"


def test_the_gateway_alone_gets_the_database_of_accounts(tmp_path: Path) -> None:
    """Its URL may have a password, which is nothing for engines."""
    url = "postgresql://moon:hush@db/accounts"
    found = make(
        tmp_path, {"MOONCACHE_CLUSTER_ACCOUNTS_DIR": url}, engine="hf", prefill=1, decode=1, model="/m"
    )
    having = {name: part.env.get("MOONCACHE_CLUSTER_ACCOUNTS_DIR") for name, part in found.parts.items()}
    assert having.pop("gateway") == url and set(having.values()) == {None}


def test_engines_share_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "gpu_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = make(tmp_path, engine="vllm", prefill=2, decode=1)
    workers = [found.parts[name].env for name in ("prefill-1", "prefill-2", "decode-1")]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in workers] == ["0", "1", "0"]
    assert "0.42" in workers[0]["MOONCACHE_VLLM_EXTRA_ARGS"], "two engines on one GPU get half of it each"
    assert "MOONCACHE_VLLM_DTYPE" not in workers[0]


def test_ports_that_are_taken() -> None:
    with socket.socket() as taken, PortPicker("127.0.0.1") as ports:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigInvalid, match=f"{port}.*--port"):
            ports.pick(port, 1, "--port")
        other = ports.pick(None, port, "--port")
        assert other not in {0, port}
        with pytest.raises(ConfigInvalid, match="another part"):
            ports.pick(other, 1, "--port")


def test_the_engine_that_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: dict[str, list[str]] = {"vllm": [], "hf": [], "none": []}
    monkeypatch.setattr(cluster_settings, "missing_modules", lambda engine: missing[engine])
    assert choose_engine("auto") == ("vllm", "")
    missing["vllm"] = ["vllm"]
    engine, why = choose_engine("auto")
    assert engine == "hf"
    assert "install_vllm.sh" in why
    with pytest.raises(ConfigInvalid, match="needs vllm"):
        choose_engine("vllm")
    missing["hf"] = ["torch"]
    engine, why = choose_engine("auto")
    assert engine == "none"
    assert "mooncache[hf]" in why
    assert choose_engine("none") == ("none", "")
    with pytest.raises(InvalidArgument, match="auto, vllm, hf or none"):
        choose_engine("llama")
    with pytest.raises(InvalidArgument, match="mooncache worker --engine sglang"):
        choose_engine("sglang")


def test_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("") == ""
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    for wrong in ("/nowhere", "./nowhere", "~/nowhere", "a/b/c"):
        with pytest.raises(InvalidArgument):
            resolve_model(wrong)


def test_conductors_that_name_each_other(tmp_path: Path) -> None:
    found = make(tmp_path, engine="hf", conductors=3, model="/m", model_name="m")
    conductors = [part for name, part in found.parts.items() if name.startswith("conductor")]
    assert [part.name for part in conductors] == ["conductor", "conductor-2", "conductor-3"]
    assert ",".join(part.control for part in conductors) == found.conductor_target
    assert len({part.control for part in conductors}) == 3
    for part in found.parts.values():
        assert part.env["MOONCACHE_CLUSTER_CONDUCTOR_TARGET"] == found.conductor_target
    with pytest.raises(InvalidArgument, match="between 1 and 8"):
        make(tmp_path, engine="hf", conductors=9)
