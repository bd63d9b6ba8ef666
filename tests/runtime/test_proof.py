"""Proofs of control calls: what is signed, what is refused, and that memory has an end."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache import auth
from mooncache.errors import OK, Unauthenticated
from mooncache.runtime.proof import (
    NO_NONCE,
    NONCE_S,
    STALE,
    WINDOW,
    Admitted,
    Gate,
    Prover,
    SignedCall,
    Window,
    answer_mac,
    call_mac,
)

CLUSTER = auth.Token("default", admin=True, key=bytes(range(32)))
TENANT = auth.tenant_token(CLUSTER, "team-a")
PATH = "/mooncache.v1.MasterService/Locate"


VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "examples" / "grpc_proof_vectors.json").read_text(encoding="utf-8")
)


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0


def gate(time: Time | None = None, **limits: int) -> Gate:
    clock = time or Time()
    return Gate(CLUSTER, lambda: clock.now_s, **limits)


def sent(gate: Gate, prover: Prover, body: bytes = b"body") -> tuple[SignedCall, Admitted]:
    """One call as it arrives, after the caller has learnt the nonce if it had to."""
    for _ in range(3):
        signed = prover.sign(PATH, sha(body))
        admitted = gate.admit(signed.authorization, PATH, sha(body))
        if not admitted.stale:
            return signed, admitted
        assert prover.proves(signed, STALE, sha(b"stale"), admitted.seal(STALE, sha(b"stale"))[0][1])
    raise AssertionError("stale forever")


def test_control_keys_are_those_of_the_documentation() -> None:
    for vector in VECTORS["control_keys"]:
        key = auth.control_key(auth.parse_token(vector["token"]))
        assert key.text == vector["control_key"]
        assert auth.parse_control_key(key.text) == key
        assert key.key.hex() not in repr(key)


@pytest.mark.parametrize("vector", VECTORS["calls"], ids=lambda vector: str(vector["what"]))
def test_proofs_are_those_of_the_documentation(vector: dict[str, Any]) -> None:
    """Both sides: what a channel sends and believes, and what a service takes and answers."""
    control, request = (
        auth.parse_control_key(vector["control_key"]),
        sha(bytes.fromhex(vector["request_hex"])),
    )
    head, answer = vector["authorization"].rpartition(" ")[0], vector["answer"]
    who = control.tenant or "*"
    assert head == f"mcp1 {who} {vector['nonce']} {vector['session']} {vector['number']}"
    mac = call_mac(control.key, head, vector["path"], request)
    assert mac.hex() == vector["authorization"].rpartition(" ")[2]
    body = answer["details"].encode() if "details" in answer else bytes.fromhex(answer["response_hex"])
    sealed = answer_mac(control.key, mac, answer["code"], answer["nonce"], sha(body))
    assert answer["mooncache_proof"] == f"{answer['nonce']} {sealed.hex()}"

    admitted = gate().admit(vector["authorization"], vector["path"], request)
    assert admitted.stale, "it fits the key; this service gave out another nonce"
    assert gate().admit(vector["authorization"], vector["path"] + "x", request).refusal != admitted.refusal
    prover = Prover((CLUSTER if control.tenant is None else TENANT).text)
    signed = SignedCall(vector["authorization"], mac, control.key)
    assert prover.proves(signed, answer["code"], sha(body), answer["mooncache_proof"])
    assert not prover.proves(signed, answer["code"] + 1, sha(body), answer["mooncache_proof"])


@pytest.mark.parametrize("token", [CLUSTER, TENANT])
def test_who_knows_the_token_is_known(token: auth.Token) -> None:
    service, prover = gate(), Prover(token.text)
    first = prover.sign(PATH, sha(b"body"))
    assert f" {NO_NONCE} " in first.authorization
    assert gate().admit(first.authorization, PATH, sha(b"body")).stale  # carried out by nobody
    signed, admitted = sent(service, prover)
    assert admitted.identify() == auth.Identity(token.tenant, token.admin)
    assert token.key.hex() not in signed.authorization
    assert prover.proves(signed, OK, sha(b"answer"), admitted.seal(OK, sha(b"answer"))[0][1])


def test_nothing_is_accepted_twice_or_elsewhere() -> None:
    service, prover = gate(), Prover(CLUSTER.text)
    signed, admitted = sent(service, prover)
    admitted.identify()
    again = service.admit(signed.authorization, PATH, sha(b"body"))
    assert again.stale
    with pytest.raises(Unauthenticated):
        again.identify()
    fresh = prover.sign(PATH, sha(b"body"))
    assert (
        gate().admit(fresh.authorization, PATH, sha(b"body")).stale
    )  # another service, or another life of it
    for path, body in ((PATH + "s", b"body"), (PATH, b"Body")):
        other = service.admit(fresh.authorization, path, sha(body))
        assert not other.stale
        with pytest.raises(Unauthenticated, match="does not fit"):
            other.identify()
    service.admit(fresh.authorization, PATH, sha(b"body")).identify()  # what was refused used nothing up


def test_a_tenant_cannot_pass_for_the_cluster_nor_for_another_tenant() -> None:
    service, prover = gate(), Prover(TENANT.text)
    sent(service, prover)
    mine = prover.sign(PATH, sha(b"")).authorization
    for who in ("*", "team-b", "default"):
        with pytest.raises(Unauthenticated, match="does not fit"):
            service.admit(mine.replace(" team-a ", f" {who} "), PATH, sha(b"")).identify()


@pytest.mark.parametrize(
    "text", ["", "x", "mcp1", "mcp1 * - 1 2 3", f"Bearer {CLUSTER.text}", "mcp1 " * 1000]
)
def test_what_is_no_proof_is_refused_without_showing_it(text: str) -> None:
    admitted = gate().admit(text, PATH, sha(b""))
    with pytest.raises(Unauthenticated) as caught:
        admitted.identify()
    assert admitted.seal(500, sha(b"")) == ()
    assert CLUSTER.key.hex() not in caught.value.message


def test_answers_of_others_prove_nothing() -> None:
    service, prover = gate(), Prover(CLUSTER.text)
    signed, admitted = sent(service, prover)
    proof = admitted.seal(OK, sha(b"answer"))[0][1]
    assert not prover.proves(signed, OK, sha(b"Answer"), proof)
    assert not prover.proves(signed, 500, sha(b"answer"), proof)
    assert not prover.proves(prover.sign(PATH, sha(b"body")), OK, sha(b"answer"), proof)
    assert not prover.proves(signed, OK, sha(b"answer"), "")
    stranger = Gate(auth.Token("default", admin=True, key=bytes(32)), lambda: 0.0)
    assert stranger.admit(signed.authorization, PATH, sha(b"body")).seal(OK, sha(b"answer")) == ()


def test_a_call_that_was_held_back_is_stale() -> None:
    time = Time()
    service, prover = gate(time), Prover(CLUSTER.text)
    sent(service, prover)
    held = [prover.sign(PATH, sha(b"body")) for _ in range(3)]
    service.admit(held[0].authorization, PATH, sha(b"body")).identify()
    time.now_s = NONCE_S + 1  # the next nonce is given out, this one is still taken
    service.admit(held[1].authorization, PATH, sha(b"body")).identify()
    assert service.admit(held[0].authorization, PATH, sha(b"body")).stale
    time.now_s = 2 * NONCE_S + 2
    assert service.admit(held[2].authorization, PATH, sha(b"body")).stale
    sent(service, prover)[1].identify()


def test_a_service_that_nobody_called_for_long_takes_no_old_nonce() -> None:
    time = Time()
    service, prover = gate(time), Prover(CLUSTER.text)
    sent(service, prover)
    held = prover.sign(PATH, sha(b"body"))
    time.now_s = 10 * NONCE_S
    assert service.admit(held.authorization, PATH, sha(b"body")).stale


def test_many_sessions_make_room_and_nothing_is_accepted_again() -> None:
    service = gate(sessions_max=4)
    calls = []
    for number in range(50):
        signed, admitted = sent(service, Prover(CLUSTER.text), b"%d" % number)
        admitted.identify()
        calls.append((signed, sha(b"%d" % number)))
    assert all(service.admit(call.authorization, PATH, body).stale for call, body in calls)


@given(st.lists(st.integers(min_value=1, max_value=3 * WINDOW), max_size=200))
def test_the_window_takes_each_number_once(numbers: list[int]) -> None:
    window, taken = Window(), set[int]()
    for number in numbers:
        expected = number not in taken and number > max(taken, default=0) - WINDOW
        assert window.take(number) is expected
        taken.add(number)
