"""Cache events: both encodings, hostile bytes, and keys that equal those of the request."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.client.keys import KEY_BYTES, split_keys
from mooncache.errors import ProtocolError
from mooncache.kvcache.keys import request_keys
from mooncache.worker.core import kv_events, own_cache
from mooncache.worker.core.kv_events import Cleared, Removed, Stored, decode
from mooncache.worker.core.own_cache import OwnCache
from tests.worker.support import PASSPORT

BLOCK = PASSPORT.block_tokens


def pack(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(
    hashes: list[Any],
    tokens: list[int],
    parent: Any = None,
    extra: list[Any] | None = None,
    positional: bool = False,
    **more: Any,
) -> Any:
    fields = {
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
        "group_idx": 0,
    } | more
    return ["BlockStored", *fields.values()] if positional else {"type": "BlockStored", **fields}


def events(payload: bytes) -> list[kv_events.Event]:
    found, invalid = decode(payload)
    assert invalid == 0
    return found


@pytest.mark.parametrize("hashes", [[7, (1 << 64) - 1], [b"a" * 32, b"b" * 32], [-5, 6]])
def test_maps_and_arrays_mean_the_same(hashes: list[Any]) -> None:
    tokens = list(range(2 * BLOCK))
    extra = [["salt"], None]
    as_map = events(pack(stored(hashes, tokens, extra=extra)))
    as_array = events(pack(stored(hashes, tokens, extra=extra, positional=True)))
    assert as_map == as_array
    assert isinstance(as_map[0], Stored)
    assert as_map[0].hashes == tuple(hashes)
    assert as_map[0].extra_keys == (("salt",), ())
    removed = events(pack({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}))
    assert removed == events(pack(["BlockRemoved", hashes, "GPU"])) == [Removed(tuple(hashes), True)]
    assert events(pack({"type": "AllBlocksCleared"}, ["AllBlocksCleared"])) == [Cleared(), Cleared()]


def test_short_arrays_of_older_publishers() -> None:
    found = events(pack(["BlockStored", [1], None, list(range(BLOCK)), BLOCK, None]))
    assert isinstance(found[0], Stored)
    assert found[0].own


def test_unknown_kinds_and_fields_are_passed_over() -> None:
    assert events(pack({"type": "BlockPolished", "shine": 3}, stored([1], list(range(BLOCK)), colour="red")))


@pytest.mark.parametrize(
    "change",
    [
        {"block_hashes": "abc"},
        {"block_hashes": [1.5]},
        {"block_hashes": [True]},
        {"block_hashes": [b""]},
        {"block_hashes": [b"x" * 65]},
        {"parent_block_hash": "x"},
        {"token_ids": [1, 2, 3]},
        {"token_ids": [1, 2, 3, -1]},
        {"token_ids": [1, 2, 3, 1 << 32]},
        {"token_ids": [1, 2, 3, True]},
        {"token_ids": None},
        {"block_size": 0},
        {"block_size": 1 << 40},
        {"block_size": "4"},
        {"medium": 5},
        {"extra_keys": ["salt"]},
        {"extra_keys": [["a"], ["b"]]},
        {"extra_keys": 5},
    ],
)
def test_an_event_with_a_wrong_field_is_skipped_alone(change: dict[str, Any]) -> None:
    wrong = stored([1], [1, 2, 3, 4]) | change
    found, invalid = decode(pack(wrong, stored([2], [1, 2, 3, 4])))
    assert invalid == 1
    assert [event.hashes for event in found if isinstance(event, Stored)] == [(2,)]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        pack()[:-1],
        b"\x01",
        b"\x92\x00\x01",
        b"\x80",
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


@given(st.binary(max_size=300))
def test_no_bytes_do_harm(payload: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(payload)


@given(st.data())
def test_damaged_batches_do_no_harm(data: st.DataObject) -> None:
    payload = bytearray(pack(stored([b"h" * 32], [1, 2, 3, 4], extra=[["salt"]])))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cache = OwnCache(PASSPORT)
    with contextlib.suppress(ProtocolError):
        cache.apply(decode(bytes(payload))[0])
    cache.check()


def test_the_number_of_events_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "EVENT_COUNT_MAX", 2)
    with pytest.raises(ProtocolError, match="3 events"):
        decode(pack(*[["AllBlocksCleared"]] * 3))


# keys


@pytest.mark.parametrize("salt", ["", "a-salt"])
@pytest.mark.parametrize("cuts", [(8,), (1, 8), (3, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_keys_equal_those_of_the_request(salt: str, cuts: tuple[int, ...]) -> None:
    """A prompt of 8 blocks, told in one event or in several, has the keys that the gateway forms."""
    tokens = random.Random(5).choices(range(1 << 32), k=8 * BLOCK)
    cache = OwnCache(PASSPORT)
    begin = 0
    for end in cuts:
        extra: list[Any] | None = [None] * (end - begin)
        if salt and begin == 0:
            extra = [[salt], *[None] * (end - 1)]
        event = stored(
            [bytes([block]) * 32 for block in range(begin, end)],
            tokens[begin * BLOCK : end * BLOCK],
            parent=bytes([begin - 1]) * 32 if begin else None,
            extra=extra if any(extra or ()) else None,
        )
        cache.apply(events(pack(event)))
        begin = end
    assert cache.keys() == set(split_keys(request_keys(PASSPORT, tokens, salt=salt)))
    report = cache.next_report()
    assert report is not None
    assert report.full
    assert set(split_keys(report.stored)) == cache.keys()
    cache.check()


def test_a_removed_parent_still_leads_to_its_children() -> None:
    """Two copies of a block can exist; one going must not hide what is stored behind the other."""
    tokens = list(range(2 * BLOCK))
    cache = OwnCache(PASSPORT)
    cache.apply(
        events(
            pack(stored([1], tokens[:BLOCK]), {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
        )
    )
    cache.apply(events(pack(stored([2], tokens[BLOCK:], parent=1))))
    assert cache.keys() == {request_keys(PASSPORT, tokens)[KEY_BYTES:]}


def test_what_has_no_key_is_counted() -> None:
    tokens = list(range(2 * BLOCK))
    cache = OwnCache(PASSPORT)
    cache.apply(
        events(
            pack(
                stored([1], tokens[:BLOCK], parent=99),
                stored([2], tokens[:BLOCK], lora_id=3),
                stored([3], tokens[:BLOCK], extra=[["salt", ["image", 0]]]),
                stored([4, 5], tokens, extra=[None, [["image", 0]]]),
                stored([6], tokens, block_size=2 * BLOCK),
                stored([7], tokens[:BLOCK], medium="CPU"),
                stored([8], tokens[:BLOCK], group_idx=1),
            )
        )
    )
    assert len(cache) == 0
    assert cache.unknown_parent_count == 1
    assert cache.not_ours_count == 7


def test_changes_are_coalesced_and_repeated_until_acknowledged() -> None:
    cache = OwnCache(PASSPORT)
    first = cache.next_report()
    assert first is not None
    assert (first.full, first.stored, first.sequence) == (True, b"", 1)
    cache.acknowledged()
    assert cache.next_report() is None
    keys = split_keys(request_keys(PASSPORT, list(range(2 * BLOCK))))
    cache.apply(events(pack(stored([1, 2], list(range(2 * BLOCK))))))
    again = [cache.next_report() for _ in range(3)]
    assert again[0] is again[1] is again[2] is not None
    cache.apply(events(pack(["BlockRemoved", [2], "GPU"], ["BlockRemoved", [77], "GPU"])))
    cache.acknowledged()
    last = cache.next_report()
    assert last is not None
    assert again[0] is not None
    assert (again[0].sequence, again[0].stored) == (2, keys[0] + keys[1])
    assert (last.sequence, last.stored, last.removed, last.full) == (3, b"", keys[1], False)


def test_too_many_changes_become_a_full_report() -> None:
    cache = OwnCache(PASSPORT, pending_max=4)
    cache.next_report()
    cache.acknowledged()
    tokens = list(range(6 * BLOCK))
    cache.apply(events(pack(stored(list(range(6)), tokens))))
    cache.check()
    report = cache.next_report()
    assert report is not None
    assert report.full
    assert set(split_keys(report.stored)) == cache.keys()


def test_a_large_full_report_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_cache, "REPORT_KEYS_MAX", 4)
    cache = OwnCache(PASSPORT)
    cache.apply(events(pack(stored(list(range(10)), list(range(10 * BLOCK))))))
    held: set[bytes] = set()
    sizes = []
    while report := cache.next_report():
        assert report.full is (not sizes)
        if len(sizes) == 1:  # something goes while the parts are under way
            cache.apply(events(pack(["BlockRemoved", [0], "GPU"])))
        held |= set(split_keys(report.stored))
        held -= set(split_keys(report.removed))
        sizes.append(len(report.stored) // KEY_BYTES)
        cache.acknowledged()
    assert sizes == [4, 4, 2, 0]
    assert held == cache.keys()


def test_the_number_of_blocks_is_limited() -> None:
    cache = OwnCache(PASSPORT, block_count_max=3)
    cache.apply(events(pack(stored(list(range(10)), list(range(10 * BLOCK))))))
    assert cache.keys() == set(split_keys(request_keys(PASSPORT, list(range(10 * BLOCK))))[7:])
    cache.check()


def test_clearing_is_told_by_a_full_report() -> None:
    cache = OwnCache(PASSPORT)
    cache.apply(events(pack(stored([1], list(range(BLOCK))))))
    cache.next_report()
    cache.acknowledged()
    cache.apply([Cleared()])
    report = cache.next_report()
    assert report is not None
    assert (report.full, report.stored) == (True, b"")


@given(st.lists(st.tuples(st.sampled_from("srcaf"), st.integers(0, 5)), max_size=80))
def test_a_conductor_that_follows_the_reports_knows_what_is_held(steps: list[tuple[str, int]]) -> None:
    """Model: a random history of stores, removals, clears, acknowledgements and lost answers."""
    cache = OwnCache(PASSPORT, pending_max=3)
    tokens = list(range(6 * BLOCK))
    reported: set[bytes] = set()
    sequence = 0
    for what, block in [*steps, *[("a", 0)] * 3]:
        if what == "s":
            cache.apply(events(pack(stored(list(range(block + 1)), tokens[: (block + 1) * BLOCK]))))
        elif what == "r":
            cache.apply(events(pack(["BlockRemoved", [block], "GPU"])))
        elif what == "c":
            cache.clear()
        elif report := cache.next_report():
            if report.full:
                reported, sequence = set(split_keys(report.stored)), report.sequence
            elif report.sequence == sequence + 1:
                reported = (reported | set(split_keys(report.stored))) - set(split_keys(report.removed))
                sequence = report.sequence
            else:
                assert report.sequence == sequence
            if what == "a":
                cache.acknowledged()
        cache.check()
    assert reported == cache.keys()
