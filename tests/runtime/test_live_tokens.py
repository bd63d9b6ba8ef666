"""The tokens of a running process follow their file; one that is wrong or gone changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache import auth
from mooncache.client.token_file import FollowedToken, KeyFollower
from mooncache.errors import MooncacheError
from mooncache.runtime import proof
from mooncache.runtime.live_tokens import LiveTokens

OLD, NEW, OTHER = (auth.Token("default", admin=True, key=bytes([number]) * 32) for number in (1, 2, 3))
PATH, DIGEST = "/mooncache.v1.MasterService/GetStatus", bytes(32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "cluster.token"
    auth.replace_token_file(found, auth.TokenSet.of(OLD))
    return found


def test_the_file_is_followed_and_a_wrong_one_changes_nothing(path: Path) -> None:
    live = LiveTokens(path, lambda: 1000.0)
    assert not live.look()
    live.used(OLD)
    auth.replace_token_file(path, auth.TokenSet((OLD, NEW), OLD, incoming=True))
    assert live.look()
    assert (live.tokens, live.text) == ((OLD, NEW), OLD.text)
    auth.replace_token_file(path, auth.TokenSet((NEW, OLD), OLD))
    assert live.look()
    assert live.text == NEW.text
    whole = path.read_text()
    path.write_text(whole[:100])
    assert not live.look()
    assert "half of it" in live.problem
    path.unlink()
    assert not live.look()
    assert "does not exist" in live.problem
    assert live.tokens == (NEW, OLD)
    path.touch(mode=0o600)
    path.write_text(whole)
    assert not live.look(), "the same tokens again"
    assert not live.problem
    path.chmod(0o644)
    auth.replace_token_file(path, auth.TokenSet((NEW,), OLD))
    assert live.look()
    assert live.used_age_ms(OLD) is None, "what is withdrawn is forgotten"


def test_a_file_with_other_tokens_only_is_not_followed(path: Path) -> None:
    live = LiveTokens(path, lambda: 1000.0)
    auth.replace_token_file(path, auth.TokenSet((NEW, OTHER), NEW))
    for _ in range(2):
        assert not live.look()
        assert "holds none of the tokens" in live.problem
        assert live.tokens == (OLD,)
    auth.replace_token_file(path, auth.TokenSet((OLD, NEW), OLD, incoming=True))
    assert live.look()
    assert (live.tokens, live.problem) == ((OLD, NEW), "")


def test_who_used_a_token_last(path: Path) -> None:
    now_s = [1000.0]
    live = LiveTokens(path, lambda: now_s[0])
    assert live.used_age_ms(OLD) is None
    live.used(OLD)
    now_s[0] = 1002.5
    assert live.used_age_ms(OLD) == 2500
    assert live.used_age_ms(OLD, also_unix_s=1002.0) == 500


def test_control_calls_go_over_to_the_new_token_and_the_old_one_ends(path: Path) -> None:
    live = LiveTokens(path, lambda: 1000.0)
    gate = proof.Gate(live, lambda: 0.0)
    source, fixed = proof.Prover(live), proof.Prover(OLD.text)

    def admits(prover: proof.Prover) -> bool:
        """Asks twice: the first answer brings the nonce."""
        for _ in range(2):
            signed = prover.sign(PATH, DIGEST)
            admitted = gate.admit(signed.authorization, PATH, DIGEST)
            sealed = dict(admitted.seal(0, DIGEST))
            if not sealed:
                return False
            assert prover.proves(signed, 0, DIGEST, sealed[proof.METADATA_KEY]), (
                "the answer fits the same token"
            )
        return admitted.identity is not None

    assert admits(source)
    assert admits(fixed)
    auth.replace_token_file(path, auth.TokenSet((NEW, OLD), OLD))
    assert live.look()
    assert admits(source)
    assert live.used_age_ms(NEW) == 0
    assert admits(fixed), "both are valid"
    for wrong in (OTHER, auth.tenant_token(OTHER, "team-a")):
        assert not admits(proof.Prover(wrong.text))
    assert admits(proof.Prover(auth.tenant_token(NEW, "team-a").text))
    auth.replace_token_file(path, auth.TokenSet((NEW,), OLD))
    assert live.look()
    assert not admits(fixed)
    assert not admits(proof.Prover(auth.tenant_token(OLD, "team-a").text))
    assert admits(source)


def test_an_answer_to_a_call_before_the_change_is_still_believed(path: Path) -> None:
    live = LiveTokens(path, lambda: 1000.0)
    gate, prover = proof.Gate(live, lambda: 0.0), proof.Prover(live)
    signed = prover.sign(PATH, DIGEST)
    admitted = gate.admit(signed.authorization, PATH, DIGEST)
    auth.replace_token_file(path, auth.TokenSet((NEW, OLD), OLD))
    assert live.look()
    prover.sign(PATH, DIGEST)
    assert prover.proves(
        signed, proof.STALE, DIGEST, dict(admitted.seal(proof.STALE, DIGEST))[proof.METADATA_KEY]
    )


def test_a_clients_file_is_followed_unless_it_is_another_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncache.client.token_file.LOOK_S", 0.0)
    file = tmp_path / "team-a.token"

    def write(text: str) -> None:
        partial = file.with_suffix(".new")
        partial.touch(mode=0o600)
        partial.write_text(text)
        partial.replace(file)

    def read(path: Path) -> tuple[str, bytes, str]:
        token = auth.parse_token(auth.read_private_file(path, "The file", 4096)[0].decode())
        return token.text, token.tenant_key, token.tenant

    first, second = (auth.tenant_token(token, "team-a") for token in (OLD, NEW))
    write(first.text)
    followed = FollowedToken(file, read)
    keys: list[bytes] = []
    follower = KeyFollower(followed, keys.append)
    follower.look()
    assert not keys
    for text in ("mct1.nonsense", auth.tenant_token(NEW, "team-b").text):
        write(text)
        follower.look()
        assert (followed.text, keys) == (first.text, [])
    file.unlink()
    assert followed.text == first.text
    write(second.text)
    follower.look()
    follower.look()
    assert (followed.text, keys) == (second.text, [second.key])
    with pytest.raises((MooncacheError, OSError)):
        FollowedToken(tmp_path / "none", read)
