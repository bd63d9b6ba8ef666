"""Weights that change in a running engine: other keys from the next step on, and never a block of both."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncache.errors import ConfigInvalid
from tests.connectors.harness import BLOCK_TOKENS, WAIT_S, Harness, Make, ask, expected, prompt
from tests.kvcache.faulty import FaultyPool

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


# --- the watch ---------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(300, 200, dtype=torch.bfloat16) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    model.register_buffer("k_scale", torch.ones(()))
    model.register_buffer("steps", torch.zeros(()))
    return model


def watch(model: Any) -> Any:
    from mooncache.connectors.vllm.weights import WeightWatch

    return WeightWatch([model])


def _trained_a_little(model: Any) -> None:
    for parameter in model.parameters():  # most elements of a small update stay as they are in bfloat16
        parameter.data.copy_(torch.where(torch.rand(parameter.shape) < 0.1, parameter * 1.01, parameter))


def _replaced(model: Any) -> None:
    model[2].weight = torch.nn.Parameter(model[2].weight.detach().clone() * 2)


def _other_memory(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.clone() + 1


def _other_scale(model: Any) -> None:
    model.k_scale.fill_(0.5)


@pytest.mark.parametrize("change", [_trained_a_little, _replaced, _other_memory, _other_scale])
def test_a_change_shows_and_going_back_gives_the_first_fingerprint(change: Callable[[Any], None]) -> None:
    from mooncache.connectors.vllm.weights import WINDOWS

    model = network()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = watch(model)
    first = seen.fingerprint
    assert not any(seen.changed() for _ in range(2 * WINDOWS))
    change(model)
    assert any(seen.changed() for _ in range(WINDOWS))
    assert seen.renew() != first
    assert not any(seen.changed() for _ in range(WINDOWS))
    model.load_state_dict(kept)
    assert seen.renew() == first


def test_equal_weights_have_equal_fingerprints_and_others_do_not() -> None:
    assert watch(network()).fingerprint == watch(network()).fingerprint
    assert watch(network()).fingerprint != watch(network(1)).fingerprint
    turned = network()
    turned[0].weight = torch.nn.Parameter(
        turned[0].weight.detach().t().contiguous().t()
    )  # other order in memory
    assert watch(turned).fingerprint != watch(network()).fingerprint


def test_what_counts_steps_is_no_weight() -> None:
    model = network()
    seen = watch(model)
    model.steps.fill_(7)
    assert not seen.changed()
    assert seen.renew() == watch(network()).fingerprint


@pytest.mark.parametrize(
    "size", ["input_size_per_partition", "input_size"]
)  # the latter of a router of experts
def test_packed_weights_are_read_by_what_they_compute(size: str) -> None:
    def pack(layer: Any) -> None:
        weight = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)
        setattr(layer, size, weight.shape[1])
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype))

    model, same = network(), network()
    pack(model[1])
    pack(same[1])
    seen = watch(model)
    assert seen.fingerprint == watch(same).fingerprint
    model[1].weight = torch.nn.Parameter(network(1)[1].weight.detach().clone())
    pack(model[1])
    assert seen.changed()
    assert seen.renew() != watch(same).fingerprint


def test_weights_that_have_no_values_have_no_fingerprint() -> None:
    model = network()
    seen = watch(model)
    model[0].weight = torch.nn.Parameter(torch.empty(200, 300, device="meta"))
    assert seen.changed()
    with pytest.raises(ConfigInvalid, match=r"0\.0\.weight"):
        seen.renew()


def test_experts_that_change_places_are_left_out() -> None:
    from mooncache.connectors.vllm.weights import WeightWatch

    model = torch.nn.ModuleDict({"experts": torch.nn.Linear(64, 64), "gate": torch.nn.Linear(64, 64)})
    seen = WeightWatch([model], experts_move=True)
    torch.nn.init.ones_(model["experts"].weight)
    assert not seen.changed()
    torch.nn.init.ones_(model["gate"].weight)
    assert seen.changed()


# --- the engine --------------------------------------------------------------------------------------------------

COUNT = 6 * BLOCK_TOKENS
WHOLE = prompt(70, COUNT + 5)


def run(engine: Harness, name: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    """One request to its end; its tokens are those of the weights that lie in memory."""
    engine.add(name, tokens, ask=ask(), **more)
    engine.run()
    assert engine.outputs[name] == expected(tokens, len(engine.outputs[name]), engine.seed)
    assert engine.leaked_blocks == 0
    reported: dict[str, Any] = engine.reported(name)
    return reported


def test_other_weights_have_other_keys_and_hit_again_among_themselves(
    make: Make, faulty: FaultyPool, tmp_path: Path
) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    first, second = (make({"mooncache.passport_path": str(path)}) for path in paths)

    def passports() -> list[Any]:
        return [json.loads(path.read_text())["passport"]["weights_digest"] for path in paths]

    run(first, "warm", WHOLE)
    assert run(second, "hit", WHOLE)["loaded_tokens"] == COUNT
    old = passports()
    assert old[0] == old[1]
    for engine in (first, second):
        engine.set_weights(7)
        assert engine.scheduler.reset_prefix_cache()
    reported = run(first, "after", WHOLE)
    assert (reported["outcome"], reported["hit_tokens"]) == ("miss", 0)
    assert run(second, "hits", WHOLE)["loaded_tokens"] == COUNT  # of the new weights: the harness compares
    assert passports()[0] == passports()[1] != old[0]
    first.set_weights(0)
    assert first.scheduler.reset_prefix_cache()
    run(first, "notices", prompt(72, 40))
    assert run(first, "back", WHOLE)["loaded_tokens"] == COUNT
    assert passports()[0] == old[0]


def test_what_ran_while_weights_changed_gives_nothing_to_the_new_generation(
    make: Make, faulty: FaultyPool
) -> None:
    """Its KV is of both. Neither its blocks nor what vLLM's own cache made of them may get a new key."""
    engine = make()
    engine.add("long", WHOLE, max_tokens=3 * BLOCK_TOKENS)
    engine.run_until(lambda: len(engine.outputs["long"]) > 3)
    engine.set_weights(7)
    engine.run_until(lambda: len(engine.outputs["long"]) > BLOCK_TOKENS)
    # These begin with the mixed request's tokens, as far as they are known, while it goes on.
    begun = [*WHOLE, *engine.outputs["long"]]
    engine.add("beside", begun, max_tokens=BLOCK_TOKENS)
    engine.run()
    assert engine.outputs["beside"] == expected(begun, BLOCK_TOKENS, 7)
    mixed = [*WHOLE, *engine.outputs["long"]]
    run(engine, "later", mixed)
    fresh = make()
    fresh.set_weights(7)
    run(fresh, "notices", prompt(73, 40))
    reported = run(fresh, "other", mixed)  # the harness compares every block that comes
    assert reported["loaded_tokens"] > 0


def test_a_load_that_is_under_way_when_weights_change_counts_for_nothing(
    make: Make, faulty: FaultyPool
) -> None:
    run(make(), "warm", WHOLE)
    engine = make()
    engine.add("r", WHOLE, ask=ask())
    engine.step()
    lookups = engine.connector._scheduler._lookups
    while lookups.pending:
        assert lookups.changed.wait(WAIT_S)
    faulty.gate = threading.Event()
    engine.run_until(lambda: engine.worker._worker._mover.loading == 1)
    engine.set_weights(7)
    engine.mixed.clear()
    engine.step()
    faulty.gate.set()
    engine.run()
    assert engine.outputs["r"] == expected(WHOLE, 4, 7)
    assert engine.reported("r")["loaded_tokens"] == 0
    assert engine.counted["load_failures:stale"] == COUNT // BLOCK_TOKENS


def test_weights_without_values_stop_the_pool_until_they_are_whole(make: Make, faulty: FaultyPool) -> None:
    engine = make()
    run(engine, "warm", WHOLE)
    whole = engine.model.weight
    engine.model.weight = torch.nn.Parameter(torch.empty(8, 8, device="meta"))
    assert engine.scheduler.reset_prefix_cache()
    calls = len(faulty.blocks)
    assert run(engine, "broken", WHOLE)["loaded_tokens"] == 0
    run(engine, "broken too", prompt(74, COUNT))
    assert len(faulty.blocks) == calls
    engine.model.weight = whole
    assert engine.scheduler.reset_prefix_cache()
    assert run(engine, "whole", WHOLE)["loaded_tokens"] == COUNT


def test_a_reset_begins_a_new_generation(make: Make, faulty: FaultyPool) -> None:
    first, second = make(), make()
    run(first, "warm", WHOLE)
    for engine in (first, second):
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert run(first, "again", WHOLE)["hit_tokens"] == 0
    assert run(second, "shared", WHOLE)["loaded_tokens"] == COUNT
    assert run(make(), "older", WHOLE)["loaded_tokens"] == COUNT  # of the generation before


def test_an_engine_whose_weights_cannot_be_seen_serves_without_the_pool(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncache.connectors.vllm import worker_side

    def blind() -> Any:
        raise ConfigInvalid("cannot be seen")

    monkeypatch.setattr(worker_side, "models_in_memory", blind)
    engine = make()
    assert run(engine, "r", WHOLE)["outcome"] == "off"
    assert faulty.calls == []
