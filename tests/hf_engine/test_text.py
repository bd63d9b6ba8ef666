"""Text as it streams: whole characters, stop strings never shown, and the same text as all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.hf_engine.core.text import TextStream


def decode(ids: list[int]) -> str:
    """One byte is one token: the hardest tokenizer there is."""
    return bytes(ids).decode("utf-8", "replace")


def pieces(data: bytes, *stops: str) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stops)
    given_out = []
    for byte in data:
        given_out.append(stream.push(byte))
    return [*given_out, stream.finish()], stream


def test_a_character_comes_when_it_is_whole() -> None:
    assert pieces("a€b".encode())[0] == ["a", "", "", "€", "b", ""]


def test_broken_bytes_come_at_the_end() -> None:
    assert "".join(pieces(b"ok\xe2\x82")[0]) == "ok\ufffd"
    assert "".join(pieces(b"\xff" * 50 + b"x")[0]).endswith("x")


@pytest.mark.parametrize(
    ("text", "stops", "shown", "met"),
    [
        ("hello STOP world", ("STOP",), "hello ", "STOP"),
        ("hello STO", ("STOP",), "hello STO", ""),
        ("aab", ("ab", "aab"), "", "aab"),
        ("xyz", ("z", "y"), "x", "y"),
        ("STOP", ("STOP",), "", "STOP"),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], shown: str, met: str) -> None:
    found, stream = pieces(text.encode(), *stops)
    assert "".join(found) == shown and stream.stopped == met


@given(st.text(max_size=40))
def test_streamed_is_whole(text: str) -> None:
    assert "".join(pieces(text.encode())[0]) == text


@given(
    st.text(alphabet="ab€", max_size=30),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3),
)
def test_nothing_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    found, stream = pieces(text.encode(), *stops)
    shown = "".join(found)
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert bool(stream.stopped) == any(stop in text for stop in stops)
