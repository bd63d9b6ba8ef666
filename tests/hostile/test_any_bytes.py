"""Parsers of bytes from outside that have no folder of tests with such a property: any bytes are understood or refused.

docs/parsers.md lists all parsers with what tries them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mooncache import _native
from mooncache.auth import Token, parse_control_key
from mooncache.client.state_dir import CLUSTER_FILE, read_cluster_file
from mooncache.cluster.processes import readable
from mooncache.cluster.watch import reason_of
from mooncache.conductor.messages import progress_of
from mooncache.coordination import MasterRecord
from mooncache.coordination.embedded import EmbeddedCoordinator
from mooncache.coordination.etcd import _number
from mooncache.coordination.records import record_of
from mooncache.errors import (
    ConfigInvalid,
    EngineFailed,
    InvalidArgument,
    MooncacheError,
    TooLarge,
    Unauthenticated,
)
from mooncache.gateway.core import answer, keyfile, prepared
from mooncache.gateway.core.rate_limit import RateLimits
from mooncache.gateway.tokens import beside
from mooncache.hf_engine.core import chat
from mooncache.kvcache import identity
from mooncache.kvcache.keys import passport_from_json
from mooncache.kvcache.leg_hint import CacheReport, LegHint
from mooncache.kvcache.leg_reports import decode as decode_leg
from mooncache.proto.v1 import conductor_pb2
from mooncache.runtime import proof
from mooncache.worker.core import facts
from tests.hostile.any_json import DEEP, objects, texts
from tests.hostile.any_message import any_message

# --- texts and values from engines, gateways, workers -----------------------------------------------------------------


@given(texts("weights_digest", "config_digest", "engine", "kv_dtype", "block_tokens"))
def test_a_passport(text: str) -> None:
    with contextlib.suppress(InvalidArgument):
        assert passport_from_json(text).block_tokens is not None


@given(st.one_of(texts("decision_id", "mooncache", "hit_tokens").map(str.encode), st.binary(max_size=5000)))
def test_a_report_of_an_ended_leg(data: bytes) -> None:
    leg = decode_leg(data)
    if leg is not None:
        assert 0 < len(leg.decision_id) <= 64
        assert leg.cache.hit_tokens >= 0


@given(texts("passport", "engine_version", "kv_bytes_per_token", "pool"))
def test_the_facts_that_an_engine_writes_down(text: str) -> None:
    with contextlib.suppress(InvalidArgument):
        assert facts.facts_from_file(text).kv_bytes_per_token >= 0


@given(objects("data", "id", "root", "max_model_len"), objects("version"), st.text(max_size=20))
def test_the_facts_that_an_engine_answers(models: Any, version: Any, number: str) -> None:
    found = facts.facts_from_http(models, version, {"block_size": number, "num_gpu_blocks": number})
    assert found.block_tokens >= 0
    assert all(isinstance(name, str) for name in facts.model_of(models))


@given(objects("mooncache", "wait_tokens", "wait_ms", "hit_tokens", "outcome", "loaded_from"))
def test_what_legs_and_engines_tell_each_other(params: Any) -> None:
    assert isinstance(LegHint.from_params(params), LegHint)
    reported = CacheReport.from_params(params)
    assert reported is None or reported.hit_tokens >= 0


@given(any_message(conductor_pb2.ReportProgressRequest, {}))
def test_the_progress_of_a_request(message: conductor_pb2.ReportProgressRequest) -> None:
    with contextlib.suppress(InvalidArgument, TooLarge):
        json.dumps(progress_of(message).to_json(), allow_nan=False)


@given(
    st.binary(max_size=300)
    | objects("usage", "error", "kv_transfer_params", "object").map(lambda value: json.dumps(value).encode())
    | st.just(DEEP.encode())
)
def test_the_stream_of_an_engine(data: bytes) -> None:
    for text in (data, b"data: " + data + b"\n\n", b"data: " + data + b'"usage"\r\n\r\ndata: [DONE]\n\n'):
        splitter, editor = answer.Splitter(), answer.StreamEditor(True)
        with contextlib.suppress(MooncacheError):
            block = splitter.feed(text)
            assert isinstance(editor.take(block), bytes)
    with contextlib.suppress(EngineFailed):
        json.loads(answer.edit_answer(data)[0])


@given(objects("role", "content", "tool_calls", "function", "arguments", "type", "text"), st.booleans())
@example({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}, True)
def test_a_message_for_the_small_engine(message: Any, structured: bool) -> None:
    with contextlib.suppress(InvalidArgument):
        chat.conversation([message], structured=structured, developer=False)


WORDS = st.sampled_from(("mooncache", "*", "default", "0" * 32, "1" * 16, "7", "f" * 64, "x"))


@given(st.text(max_size=120) | st.lists(WORDS, max_size=7).map(" ".join))
def test_the_proof_of_a_call(authorization: str) -> None:
    gate = proof.Gate(Token("default", admin=True, key=b"s" * 32), lambda: 0.0)
    with pytest.raises(Unauthenticated):
        gate.admit(authorization, "/v1/Schedule", b"d" * 32).identify()


@given(
    st.text(max_size=120)
    | st.lists(st.sampled_from(("mck1", "*", "default", "0" * 64, "f" * 64, "x", "")), max_size=4).map(
        ".".join
    )
)
def test_a_control_key_as_bearer(text: str) -> None:
    gate = proof.Gate(Token("default", admin=True, key=b"s" * 32), lambda: 0.0, bearer=True)
    with pytest.raises(Unauthenticated):
        gate.admit(f"Bearer {text}", "/v1/Schedule", b"d" * 32).identify()
    with contextlib.suppress(Unauthenticated):
        assert parse_control_key(text).text == text


@given(
    st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: len(data).to_bytes(8, "little") + data)
)
def test_a_frame_of_the_tokeniser(data: bytes) -> None:
    frame = beside.read_frame(io.BytesIO(data))
    if frame is not None:
        assert data[8 : 8 + len(frame)] == frame
        for kind in (beside.COMMANDS, prepared.ANSWERS):
            with contextlib.suppress(msgspec.DecodeError):
                msgspec.msgpack.decode(frame, type=kind)


# --- files ------------------------------------------------------------------------------------------------------------


@given(
    st.text(max_size=200)
    | st.dictionaries(
        st.sampled_from(("sha256", "tenant", "requests_per_minute", "tokens_per_minute", "other")),
        st.sampled_from(("0" * 64, "a", "A B")) | st.integers() | st.booleans() | st.floats(),
    ).map(
        lambda entry: (
            "[[key]]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in entry.items())
        )
    )
)
def test_the_keys_of_a_gateway(text: str) -> None:
    with contextlib.suppress(ConfigInvalid):
        assert isinstance(keyfile.parse(text, RateLimits()), dict)


def settled(read: Callable[[], Any], refused: type[MooncacheError]) -> None:
    with contextlib.suppress(refused):
        read()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | texts("model_type", "tokenizer_class").map(lambda text: text.encode(errors="replace"))
)
def test_the_json_files_of_a_model(tmp_path: Path, data: bytes) -> None:
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(data)
    settled(lambda: identity.config_digest(tmp_path), ConfigInvalid)
    settled(lambda: identity.tokenizer_digest(tmp_path), ConfigInvalid)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | texts("version", "files").map(lambda text: text.encode(errors="replace")))
def test_the_memory_of_digests(tmp_path: Path, data: bytes) -> None:
    (tmp_path / identity.CACHE_FILE).write_bytes(data)
    assert isinstance(identity._read_cache(tmp_path), dict)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts("master_targets", "pid", "metrics", "parts", "records", "tls_ca"))
def test_the_file_of_a_running_cluster(tmp_path: Path, text: str) -> None:
    (tmp_path / CLUSTER_FILE).write_text(text, errors="replace")
    settled(lambda: read_cluster_file(tmp_path), ConfigInvalid)


@given(texts("timestamp", "level", "event", "reason"))
def test_the_words_of_a_process(text: str) -> None:
    assert isinstance(readable(text), str)
    assert isinstance(reason_of(text.encode(errors="replace")), str)


# --- coordination -----------------------------------------------------------------------------------------------------


@given(
    st.binary(max_size=200)
    | texts("master_id", "grpc_target").map(lambda text: text.encode(errors="replace"))
)
def test_what_etcd_holds(value: bytes) -> None:
    record = record_of(value)
    assert record is None or isinstance(record.master_id, str)
    assert _number(value) >= 0


class Wall:
    def now_s(self) -> float:
        return 0.0

    def wall_s(self) -> float:
        return 1.0

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError("nothing to wait for")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.integers(0, 1 << 70).map(lambda number: str(number).encode()))
@example(str((1 << 62) - 1).encode())
@example(str(1 << 62).encode())
@example(str((1 << 63) - 2).encode())
@example(str((1 << 63) - 1).encode())
def test_the_file_with_the_term(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "master.term").write_bytes(content)
    coordinator = EmbeddedCoordinator(tmp_path / "master.term", Wall())

    async def two_terms() -> tuple[int, int]:
        await coordinator.start(MasterRecord("m", "m:1"))
        first = await coordinator.campaign()
        await coordinator.resign()
        second = await coordinator.campaign()
        await coordinator.close()
        return first.term, second.term

    first, second = asyncio.run(two_terms())
    assert 1000 <= first < second < 1 << 63


# --- native -----------------------------------------------------------------------------------------------------------


@given(
    st.binary(max_size=200) | st.integers(0, 4).flatmap(lambda n: st.binary(min_size=56 * n, max_size=56 * n))
)
def test_records_of_a_report(records: bytes) -> None:
    index = _native.BlockIndex()
    try:
        index.apply(0, records)
    except (RuntimeError, ValueError):
        assert index.stats()["blocks"] == 0, "nothing of refused records is applied"
    else:
        assert len(records) % 56 == 0


@given(st.binary(max_size=100), st.integers(0, 4))
def test_locations_from_a_master(packed: bytes, keys: int) -> None:
    client = _native.Client({"key": bytes(32)})
    with contextlib.suppress(RuntimeError):
        client.learn_locations([bytes([number]) * 32 for number in range(keys)], packed)
    client.close()
