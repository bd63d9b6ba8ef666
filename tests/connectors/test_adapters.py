"""LoRA adapters: what one is follows from its files, and blocks under vLLM's scheduler from what the adapter is."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncache.connectors.vllm import adapters
from mooncache.connectors.vllm.adapters import Adapters
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached
from mooncache.errors import ConfigInvalid
from mooncache.kvcache.identity import adapter_digest
from tests.conditions import wait_until
from tests.connectors.harness import BLOCK_TOKENS, Make, ask, expected, prompt
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

HOUR_NS = 3_600_000_000_000


def files(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    """A folder that is an adapter as far as its identity goes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    content = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def asked(path: Path | str, number: int = 1, name: str = "a") -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), is_3d_lora_weight=False)


def identities(folder: Path, *, started_ns: int | None = None, lora_config: Any = None) -> Adapters:
    """Of an engine that was started after the files were written, unless it says otherwise."""
    started_ns = time.time_ns() + HOUR_NS if started_ns is None else started_ns
    return Adapters(folder / "state", lora_config, started_ns=started_ns)


def answer(of: Adapters, lora: Any, request_id: str = "r") -> str | PoolRefusal:
    wait_until(lambda: of.ask(request_id, lora) is not None, "an answer")
    found = of.ask(request_id, lora)
    assert found is not None
    of.forget(request_id)
    return found


# --- identities --------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    one = adapter_digest(files(tmp_path / "one"))
    assert adapter_digest(files(tmp_path / "other" / "name")) == one
    assert adapter_digest(files(tmp_path / "trained", base_model_name_or_path="/x", peft_version="9")) == one
    others = [
        adapter_digest(files(tmp_path / "weights", b"others")),
        adapter_digest(files(tmp_path / "alpha", lora_alpha=32)),
        adapter_digest(files(tmp_path / "new field", use_something=True)),
    ]
    assert len({one, *others}) == 4


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_without_its_files_has_no_digest(tmp_path: Path, missing: str) -> None:
    folder = files(tmp_path / "a")
    (folder / missing).unlink()
    with pytest.raises(ConfigInvalid):
        adapter_digest(folder)


def test_two_names_of_an_adapter_are_one_and_settings_of_lora_count(tmp_path: Path) -> None:
    from vllm.config.lora import LoRAConfig

    here, there = files(tmp_path / "here"), files(tmp_path / "there")
    plain = identities(tmp_path, lora_config=LoRAConfig())
    one = answer(plain, asked(here, 1, "here"))
    assert isinstance(one, str)
    assert one
    assert answer(plain, asked(there, 2, "there")) == one
    assert plain.ask("none", None) == ""
    roomy = identities(tmp_path, lora_config=LoRAConfig(max_loras=4, max_lora_rank=64, max_cpu_loras=9))
    assert answer(roomy, asked(here)) == one
    partly = identities(tmp_path, lora_config=LoRAConfig(target_modules=["o_proj"]))
    assert answer(partly, asked(here)) != one
    for each in (plain, roomy, partly):
        each.close()


def test_an_adapter_that_cannot_be_read_is_refused_with_the_file_that_is_missing(tmp_path: Path) -> None:
    mine = identities(tmp_path)
    folder = files(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    refused = answer(mine, asked(folder, name="ours"))
    assert isinstance(refused, PoolRefusal)
    assert refused.code is Uncached.LORA_UNREADABLE
    assert "the adapter ours" in refused.text
    assert "has no weight files" in refused.text
    (folder / "adapter_model.safetensors").write_bytes(b"w")
    (folder / "adapter_config.json").write_text("{")
    refused = answer(mine, asked(folder))
    assert isinstance(refused, PoolRefusal)
    assert "is not JSON" in refused.text
    refused = answer(mine, asked("/nowhere"))
    assert isinstance(refused, PoolRefusal)
    assert "/nowhere" in refused.text
    mine.close()


def test_files_that_changed_after_the_engines_start_are_refused(tmp_path: Path) -> None:
    """The engine may have read them before or after."""
    folder = files(tmp_path / "a")
    late = identities(tmp_path, started_ns=time.time_ns())
    refused = answer(late, asked(folder))
    assert isinstance(refused, PoolRefusal)
    assert refused.code is Uncached.LORA_CHANGED
    assert "changed after the engine was started" in refused.text
    late.close()


@pytest.mark.parametrize("how", ["rewritten", "replaced", "link"])
def test_an_id_never_becomes_another_adapter(tmp_path: Path, how: str) -> None:
    one, two = files(tmp_path / "one"), files(tmp_path / "two", b"others")
    (tmp_path / "current").symlink_to(one)
    mine = identities(tmp_path)
    assert isinstance(answer(mine, asked(tmp_path / "current")), str)
    if how == "rewritten":
        (one / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
    elif how == "replaced":
        (two / "adapter_model.safetensors").replace(one / "adapter_model.safetensors")
    else:
        (tmp_path / "current").unlink()
        (tmp_path / "current").symlink_to(two)
    refused = answer(mine, asked(tmp_path / "current"))
    assert isinstance(refused, PoolRefusal)
    assert refused.code is Uncached.LORA_CHANGED
    assert isinstance(answer(mine, asked(two if how == "rewritten" else one, 2)), str) or how == "replaced"
    mine.close()


def test_an_answer_is_waited_for_by_its_event_and_a_request_that_left_is_forgotten(tmp_path: Path) -> None:
    changed = threading.Event()
    mine = Adapters(tmp_path, None, started_ns=time.time_ns() + HOUR_NS, changed=changed)
    mine.ask("r", asked(files(tmp_path / "a")))
    assert changed.wait(60)
    wait_until(lambda: not mine.pending, "the answer")
    mine.forget("r")
    mine.forget("never asked")
    assert not mine._asked._jobs
    mine.close()


# --- under vLLM's scheduler --------------------------------------------------------------------------------------


@pytest.fixture
def files_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written count as older than its engines."""
    monkeypatch.setattr(adapters, "MARGIN_NS", -HOUR_NS)


def lora(name: str, number: int, path: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path))


def test_blocks_are_shared_by_an_adapters_content_alone(
    make: Make, faulty: FaultyPool, tmp_path: Path, files_are_old: None
) -> None:
    """The model of the harness says wherever a block of another adapter is used."""
    red, blue = files(tmp_path / "red", b"red"), files(tmp_path / "blue", b"blue")
    copied = Path(shutil.copytree(red, tmp_path / "copied"))
    tokens = prompt(40, 6 * BLOCK_TOKENS + 5)
    first = make(seeds={"red": 1, "blue": 2})
    first.add("base", tokens, ask=ask())
    first.add("red", tokens, ask=ask(), lora_request=lora("red", 1, red))
    first.add("blue", tokens, ask=ask(), lora_request=lora("blue", 2, blue))
    first.run()
    assert [first.reported(name)["loaded_tokens"] for name in ("base", "red", "blue")] == [0, 0, 0]
    assert len(faulty.blocks) == 3 * 6
    second = make(seeds={"crimson": 1, "blue": 2})
    second.add("base", tokens, ask=ask())
    second.add("crimson", tokens, ask=ask(), lora_request=lora("crimson", 7, copied))
    second.add("blue", tokens, ask=ask(), lora_request=lora("blue", 1, blue))
    second.run()
    for name, seed in (("base", 0), ("crimson", 1), ("blue", 2)):
        assert second.reported(name)["loaded_tokens"] == 6 * BLOCK_TOKENS
        assert second.outputs[name] == expected(tokens, 4, seed)
    assert len(faulty.blocks) == 3 * 6
    assert second.leaked_blocks == 0


def test_a_request_whose_adapter_has_no_identity_runs_without_the_pool_and_says_why(
    make: Make, faulty: FaultyPool, tmp_path: Path, files_are_old: None
) -> None:
    tokens = prompt(41, 100)
    engine = make(seeds={"gone": 3})
    engine.add("r", tokens, ask=ask(), lora_request=lora("gone", 1, tmp_path / "gone"))
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4, 3)
    reported = engine.reported("r")
    assert reported["outcome"] == "off"
    assert reported["reason"].startswith("lora_unreadable: the adapter gone: ")
    assert engine.counted["uncached_requests:lora_unreadable"] == 1
    assert faulty.blocks == {}


def test_a_request_that_ends_before_its_adapter_is_known_leaves_nothing(
    make: Make, faulty: FaultyPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_are_old: None
) -> None:
    from vllm.v1.request import RequestStatus

    gate = threading.Event()
    read = adapters.identity.adapter_digest

    def slowly(*args: Any, **more: Any) -> str:
        assert gate.wait(60)
        return read(*args, **more)

    monkeypatch.setattr(adapters.identity, "adapter_digest", slowly)
    engine = make()
    engine.add("r", prompt(42, 100), lora_request=lora("a", 1, files(tmp_path / "a")))
    engine.add("plain", prompt(43, 100))
    engine.run_until(lambda: "plain" in engine.finished)  # others do not wait
    assert engine.status("r") == "WAITING"
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    gate.set()
    engine.run()
    side = engine.connector._scheduler
    assert not side._contents._adapters._asked._jobs
    assert not side._requests
