"""Codes, what becomes of an invitation, and the settings that are handed over: no network."""

from __future__ import annotations

import contextlib
import random
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.cluster.joining.core.code import (
    RANDOM_BYTES,
    JoinSide,
    join_proof,
    make_code,
    parse_code,
)
from mooncache.cluster.joining.core.invitation import (
    WRONG_CODES_MAX,
    Invitation,
    InvitationState,
    RefusalReason,
    judge,
    refusal_sentence,
)
from mooncache.cluster.joining.core.settings import cluster_toml, joined_settings, tls_settings
from mooncache.cluster.joining.joining import parse_join_target
from mooncache.cluster.joining.messages import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    JoinAnswer,
    JoinGreeting,
    JoinRefusal,
    JoinRequest,
    SealedMessage,
    frame_bytes,
    parsed,
)
from mooncache.errors import InvalidArgument, MooncacheError, ProtocolError

OPEN = Invitation("K7QM", "10.0.0.5:7900", 1000.0, 1900.0)


@given(st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES))
@settings(max_examples=50, deadline=None)
def test_a_code_is_read_as_people_type_it(data: bytes) -> None:
    code = make_code(data)
    assert len(code.text) == 24
    for typed in (code.text, code.text.lower(), code.text.replace("-", ""), code.text.replace("-", " ")):
        assert parse_code(typed) == code
    assert parse_code(code.text.replace("0", "O").replace("1", "l")) == code


def test_codes_differ_in_every_random_bit_but_one() -> None:
    """95 bits of the 96 make the symbols."""
    base = make_code(b"\0" * RANDOM_BYTES)
    others = {make_code((1 << bit).to_bytes(RANDOM_BYTES, "big")) for bit in range(95)}
    assert len(others) == 95
    assert base not in others


def test_typing_errors_are_found_before_anything_is_sent() -> None:
    rng = random.Random(5)
    missed = 0
    for _ in range(300):
        text = make_code(rng.randbytes(RANDOM_BYTES)).text.replace("-", "")
        at = rng.randrange(len(text))
        other = rng.choice([symbol for symbol in "0123456789ABCDEFGHJKMNPQRSTVWXYZ" if symbol != text[at]])
        try:
            parse_code(text[:at] + other + text[at + 1 :])
            missed += 1
        except InvalidArgument:
            pass
    assert missed < 30, "one in 32"


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    for kind in (JoinGreeting, SealedMessage, JoinRefusal, JoinRequest, JoinAnswer):
        for text in (data, b"{" + data + b"}"):
            with contextlib.suppress(ProtocolError):
                assert isinstance(parsed(text, kind), kind)
    with contextlib.suppress(ProtocolError):
        assert 0 < frame_bytes(data[:LENGTH_BYTES]) <= FRAME_BYTES_MAX


@given(st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_any_text_as_a_code(text: str) -> None:
    try:
        parse_code(text)
    except InvalidArgument as error:
        assert len(text) < 8 or text not in error.message  # noqa: PT017 - the text may also be a code


def test_a_proof_is_for_one_side_one_connection_and_one_message() -> None:
    key = make_code(b"a" * RANDOM_BYTES).key()
    usual = (key, JoinSide.JOINING, b"certificate", (b"1" * 32, b"2" * 32), b"body")
    proof = join_proof(*usual)
    assert proof == join_proof(*usual)
    others = [
        (make_code(b"b" * RANDOM_BYTES).key(), *usual[1:]),
        (key, JoinSide.INVITING, *usual[2:]),
        (*usual[:2], b"another certificate", *usual[3:]),
        (*usual[:3], (b"2" * 32, b"1" * 32), b"body"),
        (*usual[:4], b"another body"),
    ]
    assert proof not in {join_proof(*other) for other in others}


def test_right_codes() -> None:
    first = judge(OPEN, right=True, joins="b", now_unix_s=1001.0)
    assert first.refusal is None
    assert (first.invitation.state, first.invitation.joined) == (InvitationState.USED, "b")
    again = judge(first.invitation, right=True, joins="c", now_unix_s=1002.0)
    assert again.refusal is RefusalReason.USED
    assert again.invitation == first.invitation


def test_expiry_by_either_clock() -> None:
    for attempt in (
        judge(OPEN, right=True, joins="b", now_unix_s=1900.0),
        judge(OPEN, right=True, joins="b", now_unix_s=0.0, has_ended=True),
    ):
        assert attempt.refusal is RefusalReason.EXPIRED
        assert attempt.invitation.state is InvitationState.EXPIRED
    assert judge(OPEN, right=True, joins="b", now_unix_s=1899.9).refusal is None


def test_wrong_codes_are_counted_and_block() -> None:
    current = OPEN
    for count in range(1, WRONG_CODES_MAX + 1):
        attempt = judge(current, right=False, joins="", now_unix_s=1001.0)
        assert attempt.refusal is RefusalReason.WRONG
        current = attempt.invitation
        assert current.wrong_count == count
    assert current.state is InvitationState.BLOCKED
    assert judge(current, right=True, joins="b", now_unix_s=1002.0).refusal is RefusalReason.BLOCKED


@pytest.mark.parametrize("state", [state for state in InvitationState if state is not InvitationState.OPEN])
def test_who_does_not_know_the_code_learns_nothing(state: InvitationState) -> None:
    attempt = judge(replace(OPEN, state=state), right=False, joins="", now_unix_s=1001.0)
    assert attempt.refusal is RefusalReason.WRONG
    assert attempt.invitation.wrong_count == 0


def test_every_refusal_has_a_sentence() -> None:
    for reason in RefusalReason:
        assert refusal_sentence(reason).endswith(".")


def test_cluster_toml() -> None:
    wanted = joined_settings(
        "::1", ("a:1", "b:2"), "c:3", {"hf.dtype": "float32", "worker.model_name": 'x"y\n'}
    )
    found = tomllib.loads(cluster_toml("mooncache join", {**wanted, **tls_settings('/a "folder"')}))
    assert found["cluster"] == {"master_targets": ["a:1", "b:2"], "conductor_target": "c:3"}
    assert found["worker"]["model_name"] == 'x"y\n'
    assert found["store_node"]["data_host"] == "::1"
    assert found["tls"]["key_file"] == '/a "folder"/key.pem'
    alone = tomllib.loads(cluster_toml("mooncache join", joined_settings("h", ("a:1",), "", {})))
    assert "conductor_target" not in alone["cluster"]


def test_targets() -> None:
    assert parse_join_target("10.0.0.5") == ("10.0.0.5", 7900)
    assert parse_join_target("moon-a:7901") == ("moon-a", 7901)
    assert parse_join_target("[fe80::1]:7901") == ("fe80::1", 7901)
    assert parse_join_target("fe80::1") == ("fe80::1", 7900)
    for text in ("", ":7900", "a:b", "a:0", "a:99999", "a:" + "9" * 5000):
        with pytest.raises(MooncacheError, match="Expected HOST or HOST:PORT"):
            parse_join_target(text)
