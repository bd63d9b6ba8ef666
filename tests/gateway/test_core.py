"""The gateway's decisions, without a clock or a socket."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache import errors
from mooncache.errors import ConfigInvalid, EngineFailed
from mooncache.gateway.core import answer, body, faults, keyfile
from mooncache.gateway.core.answer import Splitter, StreamEditor, edit_answer, has_data
from mooncache.gateway.core.cors import cors_headers
from mooncache.gateway.core.fleet import EngineInstance, FleetView
from mooncache.gateway.core.openapi import document
from mooncache.gateway.core.plan import complete_tokens
from mooncache.gateway.core.rate_limit import RateLimiter, RateLimits
from mooncache.gateway.shell.conductor import plan_of
from mooncache.gateway.shell.instance_list import engine_instance_of
from mooncache.kvcache.leg_hint import CacheReport, LegHint, LegRole
from mooncache.proto.v1 import conductor_pb2 as pb


def decode_body(data: bytes, salt: str, *, chat: bool) -> bytes:
    """What the engine gets for a client's body."""
    return body.decode_body(body.forwarded(*body.parse(data, chat=chat, choice_count_max=8)), salt, LegHint())


def test_a_gateway_that_ends_says_so_and_nothing_of_store_nodes() -> None:
    message = faults.of_error(errors.Draining("The gateway is shutting down.")).message
    assert message == "The gateway is shutting down."


# --- bodies ---------------------------------------------------------------------------------------------------------


def test_unknown_fields_are_forwarded_byte_for_byte() -> None:
    data = b'{"model":"m","messages":[{"role":"user"}], "x" : 1.50e+1 , "big":123456789012345678901234567890}'
    sent = decode_body(data, "salt", chat=True)
    assert b'"x":1.50e+1' in sent
    assert b'"big":123456789012345678901234567890' in sent


@pytest.mark.parametrize("name", sorted({*body.INTERNAL, "bootstrap_room", "bootstrap_host"}))
def test_internal_fields_of_clients_are_dropped(name: str) -> None:
    value: Any = {"ttft_slo_ms": 5} if name == "mooncache" else 7
    data = json.dumps({"model": "m", "messages": [{"role": "user"}], name: value}).encode()
    sent = json.loads(decode_body(data, "salt", chat=True))
    assert name not in sent or name == "kv_transfer_params"
    assert sent["kv_transfer_params"] == LegHint().to_params()
    assert sent["cache_salt"] == "salt"


def test_stream_options_are_only_sent_with_a_stream() -> None:
    base = {"model": "m", "prompt": "x", "stream_options": {"include_usage": True, "other": 1}}
    assert "stream_options" not in json.loads(decode_body(json.dumps(base).encode(), "s", chat=False))
    streamed = decode_body(json.dumps({**base, "stream": True}).encode(), "s", chat=False)
    assert json.loads(streamed)["stream_options"] == base["stream_options"]


def test_prefill_body_has_the_prompt_and_one_token() -> None:
    sent = json.loads(
        body.prefill_body("m", body.prompt_json([[1, 2], [3]]), "s", LegHint(role=LegRole.PREFILL))
    )
    assert sent["prompt"] == [[1, 2], [3]]
    assert sent["max_tokens"] == 1
    assert json.loads(body.prefill_body("m", body.prompt_json([[1, 2]]), "s", LegHint()))["prompt"] == [1, 2]
    assert complete_tokens([40, 20], 16) == 32
    assert complete_tokens([], 16) == complete_tokens([1], 0) == 0


@given(st.binary(max_size=200) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=8),
       lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4))
       .map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_body_is_understood_or_refused(data: bytes) -> None:
    for chat in (True, False):
        try:
            body.parse(data, chat=chat, choice_count_max=8)
            continue
        except faults.Refusal as refusal:
            fault = refusal.fault
        assert fault.status == 400
        json.loads(fault.body())


# --- streams ---------------------------------------------------------------------------------------------------------

CHUNKS = [
    b'data: {"id":"1","choices":[{"delta":{"content":"\\"usage\\" \xc3\xa4"}}]}\n\n',
    b": ping\n\n",
    b'data: {"id":"1","choices":[{"delta":{"content":"b"}}]}\r\n\r\n',
    (
        b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2},'
        b'"kv_transfer_params":{"mooncache":{"hit_tokens":8}}}\n\n'
    ),
    b"data: [DONE]\n\n",
]


@given(st.lists(st.integers(0, sum(map(len, CHUNKS))), max_size=12), st.booleans())
def test_cuts_do_not_change_a_stream(cuts: list[int], wants_usage: bool) -> None:
    data = b"".join(CHUNKS)
    expected = StreamEditor(wants_usage).take(data)
    splitter, editor = Splitter(), StreamEditor(wants_usage)
    points = [0, *sorted(cuts), len(data)]
    out = b""
    for begin, end in itertools.pairwise(points):
        if block := splitter.feed(data[begin:end]):
            out += editor.take(block)
    assert out == expected
    assert editor.done and not splitter.rest
    assert editor.usage == answer.TokenUsage(9, 2, None)
    assert editor.cache == CacheReport(hit_tokens=8)
    assert (b'"cached_tokens":8' in out) is wants_usage
    assert b"kv_transfer_params" not in out
    assert b": ping" in out


def test_plain_events_are_not_touched() -> None:
    block = b'data: {"a" : 1}\n\nevent: x\ndata: {"b":2}\n\n'
    editor = StreamEditor(False)
    assert editor.take(block) is block
    assert editor.event_count == 2
    assert has_data(block) and not has_data(b": only a comment\n\n")


def test_usage_in_every_event_keeps_its_choices() -> None:
    editor = StreamEditor(False)
    event = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":1}}\n\n'
    assert editor.take(event) == b'data: {"choices":[{"index":0}]}\n\n'


def test_where_an_encoder_put_its_output_is_not_for_clients() -> None:
    where = b'"ec_transfer_params":{"peer_host":"10.0.0.1"}'
    event = b'data: {"choices":[{"index":0}],' + where + b"}\n\n"
    assert StreamEditor(True).take(event) == b'data: {"choices":[{"index":0}]}\n\n'
    assert edit_answer(b'{"id":"1",' + where + b"}")[0] == b'{"id":"1"}'


def test_nothing_follows_the_end_or_an_error() -> None:
    editor = StreamEditor(False)
    assert editor.take(b'data: [DONE]\n\ndata: {"late":1}\n\n') == b"data: [DONE]\n\n"
    editor = StreamEditor(False)
    out = editor.take(b'data: {"error":"flat text"}\n\ndata: [DONE]\n\n')
    assert out.count(b"data:") == 1 and editor.fault is not None
    assert editor.fault.message == "flat text"
    assert not editor.done


def test_event_without_end_is_limited() -> None:
    splitter = Splitter(event_bytes_max=100)
    for _ in range(10):
        assert splitter.feed(b"x" * 10) == b""
    with pytest.raises(EngineFailed):
        splitter.feed(b"x")


@pytest.mark.parametrize(
    ("outcome", "cached"),
    [("hit", 672), ("off", 672), ("timeout", 256), ("failed", 256), ("load_cut", 256)],
)
def test_tokens_that_were_promised_and_did_not_come_are_not_cached(outcome: str, cached: int) -> None:
    """vLLM's usage counts what was promised."""
    usage = '"usage":{"prompt_tokens":700,"prompt_tokens_details":{"cached_tokens":672}}'
    report = f'"kv_transfer_params":{{"mooncache":{{"hit_tokens":256,"outcome":"{outcome}"}}}}'
    out, _, _ = edit_answer(f'{{"id":"1",{usage},{report}}}'.encode())
    assert json.loads(out)["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_whole_answer_loses_transfer_params_and_keeps_the_rest() -> None:
    data = b'{"id":"1","x":1.50,"usage":{"prompt_tokens":10},"kv_transfer_params":{"mooncache":{"hit_tokens":99}}}'
    out, found, reported = edit_answer(data, None)
    assert b'"x":1.50' in out and b"kv_transfer" not in out
    assert (
        json.loads(out)["usage"]["prompt_tokens_details"]["cached_tokens"] == 10
    )  # never more than there are
    assert found.prompt_tokens == 10 and reported is not None
    assert json.loads(edit_answer(data, 4)[0])["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    for broken in (b"", b"[]", b"\xff"):
        with pytest.raises(EngineFailed):
            edit_answer(broken, None)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_every_error_of_the_catalogue_is_an_answer() -> None:
    for error_class in errors.catalogue():
        fault = faults.of_error(error_class("text"))
        assert 400 <= fault.status < 600
        inner = json.loads(fault.body())["error"]
        assert set(inner) == {"message", "type", "param", "code"} and "text" in inner["message"]
        if fault.status == 429:
            assert dict(fault.headers())["retry-after"]
        assert fault.event().startswith(b"data: {") and fault.event().endswith(b"\n\n")


@given(st.integers(400, 599), st.binary(max_size=200))
def test_any_engine_error_is_normalised(status: int, data: bytes) -> None:
    fault = faults.of_engine(status, data)
    assert fault.message and json.loads(fault.body())["error"]["code"] is not None


# --- limits, keys, plans ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=60), st.integers(1, 120))
def test_nobody_gets_more_than_the_rate(steps: list[tuple[float, int]], per_minute: int) -> None:
    limiter, limits, now_s, admitted = RateLimiter(), RateLimits(per_minute, 0), 100.0, 0
    for pause_s, _ in steps:
        now_s += pause_s
        verdict = limiter.ask("t", limits, now_s)
        if verdict.limit:
            assert verdict.wait_s > 0
            now_s += verdict.wait_s + 1e-6
            assert not limiter.ask("t", limits, now_s).limit  # who comes back on time gets in
        admitted += 1
    assert admitted <= per_minute * (1 + (now_s - 100.0) / 60) + 1e-3 * len(steps) + 1
    limiter.check()


def test_tokens_may_be_charged_below_zero_and_are_paid_back() -> None:
    limiter, limits = RateLimiter(), RateLimits(0, 60)
    assert not limiter.ask("t", limits, 0.0).limit
    limiter.charge("t", limits, 120, 0.0)
    refused = limiter.ask("t", limits, 0.0)
    assert refused.limit == "tokens" and refused.wait_s == pytest.approx(61.0)
    assert not limiter.ask("t", limits, 61.5).limit
    assert not limiter.ask("other", limits, 0.0).limit


def test_number_of_buckets_is_limited() -> None:
    limiter = RateLimiter(tenant_count_max=2)
    for number in range(100):
        limiter.ask(str(number), RateLimits(5, 5), 0.0)
        limiter.check()


def test_key_file() -> None:
    digest = hashlib.sha256(b"k").hexdigest()
    text = f'[[key]]\nsha256 = "{digest.upper()}"\ntenant = "a"\ntokens_per_minute = 5\n'
    assert keyfile.parse(text, RateLimits(7, 9)) == {digest: keyfile.ApiKey("a", RateLimits(7, 5))}
    for wrong in (
        "x",
        "a = 1",
        "key = 3",
        '[[key]]\nsha256 = "12"\ntenant = "a"',
        f'[[key]]\nsha256 = "{digest}"\ntenant = "A B"',
        f'[[key]]\nsha256 = "{digest}"\ntenant = "a"\nrequests_per_minute = -1',
        f'[[key]]\nsha256 = "{digest}"\ntenant = "a"\nother = 1',
        text + text,
    ):
        with pytest.raises(ConfigInvalid):
            keyfile.parse(wrong, RateLimits())


def test_plan_without_a_second_instance_has_no_prefill_leg() -> None:
    response = pb.ScheduleResponse(admitted=True)
    response.decode.instance_id = response.prefill.instance_id = "same"
    assert plan_of(response, "m").prefill is None


def test_too_long() -> None:
    body.check_length(0, 10**9, 0, chat=True)
    body.check_length(100, 99, 0, chat=True)
    for prompt_tokens, output_tokens in ((100, 0), (90, 11)):
        with pytest.raises(faults.Refusal):
            body.check_length(100, prompt_tokens, output_tokens, chat=False)


def listed(**fields: Any) -> EngineInstance:
    return engine_instance_of(pb.InstanceView(instance=pb.Instance(**fields)))


def test_fleet_forgets_instances_but_not_models() -> None:
    fleet, wall_s = FleetView(), iter((9e8, 1e9, 1.0, 2e9, 3.0, 1e9, 4.0, 5.0))  # a clock that jumps
    ready = {"state": pb.INSTANCE_STATE_READY, "model": "m"}
    views = [
        listed(instance_id="p", role=pb.INSTANCE_ROLE_PREFILL, **ready),
        listed(instance_id="d", role=pb.INSTANCE_ROLE_DECODE, **ready),
        listed(instance_id="s", model="m", state=pb.INSTANCE_STATE_SUSPECT),
        listed(instance_id="bad", passport_json="{", **ready),
    ]
    fleet.apply(1, views, 5.0, next(wall_s))
    chosen = {fleet.next_instance("m").instance_id for _ in range(9)}  # type: ignore[union-attr]
    assert chosen == {"d", "bad"}
    last = fleet.next_instance("m", ["d", "bad"])
    assert last is not None and last.instance_id == "p"  # better than nobody
    fleet.apply(2, [], 6.0, next(wall_s))
    assert fleet.next_instance("m") is not None, "a conductor that was started again hears of it soon"
    fleet.apply(3, views[:1], 7.0, next(wall_s))
    assert not fleet.forget_lost(99.0) and len(fleet.models["m"].instances) == 1
    fleet.apply(4, [], 8.0, next(wall_s))
    assert fleet.forget_lost(12.0)
    fleet.apply(5, [], 12.5, next(wall_s))
    assert not fleet.forget_lost(13.0), "a further list is no reason to wait longer"
    assert fleet.models["m"].instances == () and fleet.next_instance("m") is None
    suspect = listed(instance_id="s", model="m", state=pb.INSTANCE_STATE_SUSPECT)
    fleet.apply(6, views[:1], 14.0, next(wall_s))
    fleet.apply(7, [suspect], 15.0, next(wall_s))
    fleet.apply(8, [], 16.0, next(wall_s))
    assert fleet.models["m"].instances == ()


def test_cors_headers() -> None:
    assert cors_headers({"origin": "https://a"}, ()) == {}
    assert cors_headers({}, ("*",)) == {}
    assert cors_headers({"origin": "https://a"}, ("*",))["access-control-allow-origin"] == "*"
    asked = {
        "origin": "a",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x\r\ny",
    }
    assert cors_headers(asked, ("a",))["access-control-allow-headers"] == "authorization, content-type"


@pytest.mark.parametrize("batches", [False, True])
def test_openapi_document_is_json_with_known_references(batches: bool) -> None:
    text = json.dumps(document(128, open_metrics=True, batches=batches))
    assert ("/v1/batches" in text) == batches
    schemas = json.loads(text)["components"]["schemas"]
    for part in text.split("#/components/schemas/")[1:]:
        assert part.split('"')[0] in schemas
