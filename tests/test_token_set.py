"""Two cluster tokens at a time: what a file may hold, what is refused, and which salts follow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncache import auth
from mooncache.errors import ConfigInvalid, Unauthenticated

OLD, NEW, OTHER = (auth.Token("default", admin=True, key=bytes([number]) * 32) for number in (1, 2, 3))
BOTH = auth.TokenSet((NEW, OLD), OLD)
WHERE = Path("cluster.token")


def parsed(text: str) -> auth.TokenSet:
    return auth.parse_token_file(text.encode(), WHERE)


@pytest.mark.parametrize(
    "tokens",
    [
        auth.TokenSet.of(OLD),
        BOTH,
        auth.TokenSet((OLD, NEW), OLD, incoming=True),
        auth.TokenSet((NEW,), OLD),
        auth.TokenSet((NEW,), OTHER),
    ],
)
def test_what_is_written_is_read(tokens: auth.TokenSet) -> None:
    assert parsed(tokens.text()) == tokens


def test_one_token_alone_is_the_line_that_older_versions_read() -> None:
    assert auth.TokenSet.of(OLD).text() == OLD.text + "\n"
    assert parsed(OLD.text) == auth.TokenSet.of(OLD)
    assert parsed(f"{NEW.text}\n{OLD.text}\n").tokens == (NEW, OLD), "two lines by hand"


@pytest.mark.parametrize("tokens", [BOTH, auth.TokenSet((NEW,), OLD)])
def test_no_part_of_a_file_is_taken_for_the_whole(tokens: auth.TokenSet) -> None:
    text = tokens.text().rstrip("\n")
    for size in range(len(text)):
        with pytest.raises(ConfigInvalid):
            parsed(text[:size])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "mcc1." + "0" * 63,
        "mct1.team-a." + "0" * 64,
        f"{OLD.text} {NEW.text}",
        f"{OLD.text}\n{OLD.text}",
        f"{OLD.text}\n{NEW.text}\n{OTHER.text}",
        f"{OLD.text}\r\n{NEW.text}",
        f"mcr1.{'0' * 64}",
        f"mcr1.{'0' * 64}\n{OLD.text}",
        f"mooncache-tokens 2 outgoing\n{OLD.text}\nend",
        f"mooncache-tokens 1 outgoing\n{OLD.text}\nend\n{NEW.text}",
        "mooncache-tokens 1 outgoing\nend",
        f"mooncache-tokens 1 outgoing\nmct1.a.{'0' * 64}\nend",
        f"{OLD.text}\n\x00",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        OLD.text + "\n" * 5000,
    ],
)
def test_another_content_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        auth.parse_token_file(text.encode("latin-1"), WHERE)
    assert OLD.key.hex() not in str(caught.value)
    assert NEW.key.hex() not in str(caught.value)


def test_a_file_is_replaced_as_a_whole_and_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "cluster.token"
    auth.create_cluster_token(path)
    auth.replace_token_file(path, BOTH)
    assert auth.load_token_set(path) == BOTH
    assert auth.load_cluster_token(path) == NEW, "the first one signs"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["cluster.token"]


class Used(auth.FixedTokens):
    """Two tokens that note which one was proven."""

    def __init__(self) -> None:
        super().__init__(NEW)
        self.tokens = (NEW, OLD)
        self.seen: list[auth.Token] = []

    def used(self, token: auth.Token) -> None:
        self.seen.append(token)


def test_both_tokens_and_what_is_made_from_them_are_accepted_and_no_other() -> None:
    tokens = Used()
    checked = auth.Authenticator(tokens)
    for token in (NEW, OLD):
        assert checked.identify(f"Bearer {token.text}").admin
        assert checked.identify(f"Bearer {auth.tenant_token(token, 'team-a').text}").tenant == "team-a"
    assert tokens.seen == [NEW, NEW, OLD, OLD]
    mixed = auth.Token("team-b", admin=False, key=auth.tenant_token(NEW, "team-a").key)
    for wrong in (OTHER, auth.tenant_token(OTHER, "team-a"), mixed):
        with pytest.raises(Unauthenticated):
            checked.identify(f"Bearer {wrong.text}")
    assert len(tokens.seen) == 4


def test_salts_outlive_the_token_that_they_come_from() -> None:
    before = auth.cache_salt(auth.TokenSet.of(OLD).salts, "team-a")
    assert auth.cache_salt(BOTH.salts, "team-a") == before
    assert auth.cache_salt(auth.TokenSet((NEW,), OLD).salts, "team-a") == before
    assert auth.cache_salt(auth.TokenSet.of(NEW).salts, "team-a") != before


def test_fingerprints_tell_tokens_apart_and_nothing_of_them() -> None:
    assert len({token.fingerprint for token in (OLD, NEW, OTHER)}) == 3
    assert OLD.fingerprint == auth.parse_token(OLD.text).fingerprint
    assert OLD.fingerprint not in OLD.key.hex()
    assert OLD.key.hex() not in repr(BOTH)
