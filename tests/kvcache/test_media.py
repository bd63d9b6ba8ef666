"""Media in a prompt: a block's key is one of the media that begin in front of its end, and of nothing behind it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncache.client.keys import KEY_BYTES, split_keys
from mooncache.kvcache.keys import content_passport, request_keys
from mooncache.kvcache.media import Medium, chain_keys

SIZE = 4
PASSPORT = content_passport(SIZE)
TOKENS = list(range(100, 100 + 6 * SIZE + 1))


def keys(*media: Medium, tokens: list[int] = TOKENS) -> list[bytes]:
    return split_keys(request_keys(PASSPORT, tokens, media=media))


def test_a_medium_changes_its_block_and_all_behind_it() -> None:
    plain = split_keys(request_keys(PASSPORT, TOKENS))
    red, blue = keys(Medium(9, 15, "red")), keys(Medium(9, 15, "blue"))
    assert red[:2] == blue[:2] == plain[:2]
    assert not set(red[2:]) & set(plain)
    assert not set(red[2:]) & set(blue)
    assert red == keys(Medium(9, 15, "red"))


def test_place_length_and_company_of_a_medium_count() -> None:
    ways = [
        keys(Medium(0, 4, "red")),
        keys(Medium(1, 5, "red")),
        keys(Medium(0, 5, "red")),
        keys(Medium(0, 4, "red"), Medium(5, 6, "blue")),
        keys(Medium(0, 4, "blue"), Medium(5, 6, "red")),
        keys(Medium(0, 2, "red"), Medium(2, 4, "blue")),
        keys(Medium(0, 2, "blue"), Medium(2, 4, "red")),
        keys(),
    ]
    assert len({way[-1] for way in ways}) == len(ways)
    # The order in which they are named does not.
    assert keys(Medium(5, 6, "blue"), Medium(0, 4, "red")) == ways[3]


def test_a_medium_behind_the_complete_blocks_counts_when_its_block_is_complete() -> None:
    late = Medium(6 * SIZE, 6 * SIZE + 1, "red")
    assert keys(late) == keys()
    longer = [*TOKENS, 1, 2, 3]
    assert keys(late, tokens=longer)[:6] == keys()
    assert keys(late, tokens=longer)[6] != keys(tokens=longer)[6]


def test_a_public_beginning_has_its_media_in_it() -> None:
    red, blue = (
        split_keys(
            request_keys(
                PASSPORT,
                TOKENS,
                salt="mine",
                public_tokens=8,
                public_salt="all",
                media=[Medium(5, 7, digest)],
            )
        )
        for digest in ("red", "blue")
    )
    assert red[0] == blue[0]
    assert not set(red[1:]) & set(blue[1:])


@given(
    media=st.lists(
        st.builds(
            lambda begin, length, digest: Medium(begin, begin + length, digest),
            st.integers(0, 26),
            st.integers(1, 9),
            st.sampled_from("abc"),
        ),
        max_size=4,
    ),
    cut=st.integers(0, 6),
)
def test_a_chain_goes_on_where_it_was_left(media: list[Medium], cut: int) -> None:
    whole = chain_keys(PASSPORT, TOKENS, media)
    first = cut * SIZE
    begun = chain_keys(PASSPORT, TOKENS[:first], media)
    rest = chain_keys(PASSPORT, TOKENS[first:], media, begun[-KEY_BYTES:] or None, first=first)
    assert begun + rest == whole
    assert len(whole) == 6 * KEY_BYTES
