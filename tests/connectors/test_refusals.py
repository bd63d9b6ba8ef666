"""Engines and requests that cannot use the pool correctly do not, and say why: in the log, in a metric and in each
request's report, by a code that stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mooncache.connectors.vllm.core.refusals import (
    REASON_CHARS_MAX,
    PoolRefusal,
    Uncached,
    of_engine,
    said,
)
from mooncache.errors import ConfigInvalid
from mooncache.kvcache.leg_hint import CacheReport
from tests.connectors.harness import BLOCK_TOKENS, Make, ask, expected, prompt
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.mark.parametrize("code", [code for code in Uncached if code])
@pytest.mark.parametrize("text", ["", " ", "why " * 200])
def test_every_refusal_has_a_sentence_that_a_report_carries(code: Uncached, text: str) -> None:
    reason = str(PoolRefusal(code, text))
    assert reason.startswith(f"{code}: ")
    assert len(reason.removeprefix(f"{code}: ").strip()) >= 10
    heard = CacheReport.from_params(CacheReport(reason=reason).to_params())
    assert heard is not None
    assert heard.reason == reason
    assert len(reason) <= REASON_CHARS_MAX


@pytest.mark.parametrize(
    "error", [OSError(), AssertionError(), KeyError(), ConfigInvalid(""), ValueError(" ")]
)
def test_an_error_without_words_is_named(error: Exception) -> None:
    assert said(error).strip()


# --- engines -----------------------------------------------------------------------------------------------------


def _groups(engine: Any, *specs: object) -> None:
    group = engine.cache.kv_cache_groups[0]
    engine.cache.kv_cache_groups = [dataclasses.replace(group, kv_cache_spec=spec) for spec in specs]


def _spec(engine: Any) -> Any:
    return engine.cache.kv_cache_groups[0].kv_cache_spec


def _sliding(engine: Any) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    known = _spec(engine)
    return SlidingWindowSpec(
        block_size=known.block_size,
        num_kv_heads=known.num_kv_heads,
        head_size=known.head_size,
        dtype=known.dtype,
        sliding_window=128,
    )


def _sized(engine: Any, times: int) -> Any:
    """A window whose blocks are so many times as long."""
    return dataclasses.replace(_sliding(engine), block_size=times * BLOCK_TOKENS)


def _recurrent(engine: Any, **fields: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    known = {"block_size": BLOCK_TOKENS, "shapes": ((4, 2),), "dtypes": (torch.float32,)}
    page = _spec(engine).page_size_bytes
    return MambaSpec(**{**known, "page_size_padded": page, "mamba_cache_mode": "align", **fields})


def _with(engine: Any, **fields: Any) -> None:
    """A second group, and these fields of it."""
    _groups(engine, _spec(engine), _sliding(engine))
    first, second = engine.cache.kv_cache_groups
    engine.cache.kv_cache_groups = [first, dataclasses.replace(second, **fields)]


def _mixed(engine: Any, layer: Any) -> Any:
    """Layers that vLLM manages as one group, each with sizes of its own."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"a": layer})


ENGINES: dict[str, tuple[Callable[[Any], object], Uncached, str]] = {
    "blocks that rarely end together": (
        lambda e: _groups(e, _sized(e, 3), _sized(e, 7), _sized(e, 8)),
        Uncached.KV_GROUPS,
        f"end together every {168 * BLOCK_TOKENS} tokens only: {56 + 24 + 21} of them lie in between",
    ),
    "states beside blocks of two sizes": (
        lambda e: _groups(e, _sized(e, 2), _recurrent(e)),
        Uncached.KV_GROUPS,
        f"with blocks of {BLOCK_TOKENS}, {2 * BLOCK_TOKENS} tokens, and recurrent states",
    ),
    "a window with blocks of another size": (
        lambda e: _groups(e, _sized(e, 2)),
        Uncached.KV_GROUPS,
        f"with blocks of {2 * BLOCK_TOKENS} tokens, and not of {BLOCK_TOKENS}",
    ),
    "how to help": (
        lambda e: _with(e, is_eagle_group=True),
        Uncached.KV_GROUPS,
        "--disable-hybrid-kv-cache-manager",
    ),
    "drafts": (lambda e: _with(e, is_eagle_group=True), Uncached.KV_GROUPS, "draft model"),
    "not to be transferred": (
        lambda e: _with(e, enable_kv_transfer=False),
        Uncached.KV_GROUPS,
        "not to be transferred",
    ),
    "windows of layers that differ": (
        lambda e: _groups(e, _mixed(e, _sliding(e))),
        Uncached.ATTENTION_KIND,
        "SlidingWindowSpec",
    ),
    "states that are not kept": (
        lambda e: _groups(e, _spec(e), _recurrent(e, mamba_cache_mode="none")),
        Uncached.RECURRENT_STATE,
        "FullAttentionSpec, MambaSpec; of its recurrent states: mamba_cache_mode is none",
    ),
    "states that drafts pass": (
        lambda e: _groups(e, _spec(e), _recurrent(e, num_speculative_blocks=1)),
        Uncached.RECURRENT_STATE,
        "drafts",
    ),
    "states within blocks": (
        lambda e: _groups(e, *[_recurrent(e, block_size=2 * BLOCK_TOKENS)] * 2),
        Uncached.RECURRENT_STATE,
        f"every {BLOCK_TOKENS} tokens, and not every {2 * BLOCK_TOKENS}",
    ),
    "states of layers that differ": (
        lambda e: _groups(e, _mixed(e, _recurrent(e))),
        Uncached.ATTENTION_KIND,
        "MambaSpec",
    ),
    "not causal": (
        lambda e: _groups(e, dataclasses.replace(_spec(e), non_causal=True)),
        Uncached.NOT_CAUSAL,
        "not causal",
    ),
    "scales of tokens": (
        lambda e: setattr(e.config.cache_config, "cache_dtype", "fp8_per_token_head"),
        Uncached.KV_SCALES,
        "fp8_per_token_head",
    ),
    "context parallel": (
        lambda e: setattr(e.config.parallel_config, "decode_context_parallel_size", 2),
        Uncached.CONTEXT_PARALLEL,
        "decode_context_parallel_size is 2",
    ),
    "role": (
        lambda e: setattr(e.config.kv_transfer_config, "kv_role", "kv_producer"),
        Uncached.KV_ROLE,
        "kv_both",
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines_whose_blocks_would_be_wrong_are_refused_by_their_configuration(
    make: Make, faulty: FaultyPool, name: str
) -> None:
    change, code, words = ENGINES[name]
    engine = make()
    assert of_engine(enabled=True, config=engine.config, cache_config=engine.cache) is None
    change(engine)
    refusal = of_engine(enabled=True, config=engine.config, cache_config=engine.cache)
    assert refusal is not None
    assert refusal.code is code
    assert words in refusal.text


@pytest.mark.parametrize("kind", ["window", "groups", "states", "sizes"])
def test_windows_states_and_several_groups_are_no_reason(make: Make, faulty: FaultyPool, kind: str) -> None:
    engine = make()
    specs = {
        "window": [_sliding(engine)],
        "groups": [_spec(engine), _sliding(engine), _sliding(engine)],
        "states": [_recurrent(engine), _spec(engine), _recurrent(engine)],
        "sizes": [_spec(engine), _sized(engine, 2), _sized(engine, 3)],
    }
    _groups(engine, *specs[kind])
    assert of_engine(enabled=True, config=engine.config, cache_config=engine.cache) is None


def _unreadable_weights(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from mooncache.connectors.vllm import worker_side

    def fails() -> Any:
        raise error

    monkeypatch.setattr(worker_side, "models_in_memory", fails)


def _unreadable_model(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from mooncache.connectors.vllm import worker_side

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(worker_side, "read_passports", fails)


@pytest.mark.parametrize(
    ("breaks", "code"),
    [(_unreadable_weights, "weights_unreadable"), (_unreadable_model, "model_unreadable")],
)
@pytest.mark.parametrize(
    "error", [ConfigInvalid("The packed weights of router cannot be read."), AssertionError()]
)
def test_a_worker_that_cannot_tell_its_kv_turns_the_pool_off_and_every_request_says_so(
    make: Make,
    faulty: FaultyPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[pytest.MonkeyPatch, Exception], None],
    code: str,
    error: Exception,
) -> None:
    breaks(monkeypatch, error)
    engine = make()
    tokens = prompt(60, 100)
    engine.add("r", tokens, ask=ask("decode", wait_tokens=96, wait_ms=20_000))
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert reported["outcome"] == "off"
    assert reported["reason"] == f"{code}: {said(error)}"
    assert engine.counted[f"uncached_requests:{code}"] == 1
    assert faulty.calls == []
    # What is no error of ours is a defect as well.
    assert bool(engine.counted.get("defects")) is isinstance(error, AssertionError)


def test_an_engine_without_a_handshake_says_that(make: Make, faulty: FaultyPool) -> None:
    from mooncache.connectors.vllm.core.book import RequestBook

    book = RequestBook([])
    assert book.add("r", [1] * 64, salt="", params={"mooncache": {}}) is Uncached.NOT_STARTED
    heard = book.cache_report("r")
    assert heard is not None
    assert heard.reason.startswith("not_started: ")


# --- requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("prompt_embeds", object(), Uncached.PROMPT_EMBEDS),
        ("prompt_token_ids", None, Uncached.PROMPT_EMBEDS),
        ("pooling_params", object(), Uncached.POOLING),
        ("resumable", True, Uncached.STREAMING_INPUT),
    ],
)
def test_requests_whose_tokens_do_not_say_what_their_kv_is(field: str, value: object, code: Uncached) -> None:
    from mooncache.connectors.vllm.core.engine_request import why_uncached

    request = SimpleNamespace(prompt_embeds=None, prompt_token_ids=[1], pooling_params=None, resumable=False)
    assert why_uncached(request) is Uncached.NO
    setattr(request, field, value)
    assert why_uncached(request) is code


def test_such_a_request_is_computed_and_says_why(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(61, 100)
    engine = make()
    engine.add("r", tokens, ask=ask())
    engine.scheduler.requests["r"].prompt_embeds = object()
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["loaded_tokens"], reported["saved_blocks"]) == ("off", 0, 0)
    assert reported["reason"].startswith("prompt_embeds: ")
    assert engine.counted["uncached_requests:prompt_embeds"] == 1
    assert faulty.blocks == {}
