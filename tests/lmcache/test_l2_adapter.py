"""Objects of a server go to a real node through the adapter of LMCache's own factory, and come back in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conditions import wait_until
from tests.lmcache.package import need_lmcache

need_lmcache()

from lmcache.v1.distributed.api import MemoryLayoutDesc  # noqa: E402

from tests.kvcache.faulty import FaultyPool  # noqa: E402
from tests.lmcache.servers import DTYPE, SIZE, content, keys, layout  # noqa: E402

Make = Callable[..., Any]


def test_objects_come_back_in_another_server(server: Make) -> None:
    writer, reader = server(), server()
    asked = keys(1, 2, 3)
    assert reader.lookup(asked) == [False] * 3
    objects = writer.objects([4, 0, 7], [1, 2, 3])
    result = writer.store(asked, objects)
    assert result.is_successful()
    assert result.bytes_transferred() == 3 * SIZE
    assert reader.lookup(asked) == [True] * 3
    came = reader.objects([1, 9, 3], [11, 12, 13])
    assert reader.load(asked, came) == [True] * 3
    assert list(map(content, came)) == list(map(content, objects))


def test_each_object_has_its_own_answer(server: Make) -> None:
    one = server()
    assert one.store(keys(11, 13), one.objects([0, 1], [11, 13])).is_successful()
    asked = keys(11, 12, 13)
    assert one.lookup(asked) == [True, False, True]
    came = one.objects([2, 3, 4], [None] * 3)
    assert one.load(asked, came) == [True, False, True]
    assert [content(came[0]), content(came[2])] == [content(each) for each in one.objects([0, 1], [11, 13])]


def test_what_is_there_counts_as_stored_and_moves_no_byte(server: Make) -> None:
    first, second = server(), server()
    objects = first.objects([0, 1], [21, 22])
    assert first.store(keys(21), objects[:1]).is_successful()
    result = second.store(keys(21, 22), second.objects([0, 1], [21, 22]))
    assert result.is_successful()
    assert result.bytes_transferred() == SIZE
    assert second.adapter.get_usage().total_bytes_used == SIZE


def test_the_three_event_fds_are_distinct(server: Make) -> None:
    adapters = [server().adapter for _ in range(2)]
    fds = [
        fd
        for adapter in adapters
        for fd in (
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        )
    ]
    assert len(set(fds)) == len(fds)


def test_a_question_without_a_layout_means_the_one_that_was_stored(server: Make) -> None:
    """`lmcache bench l2` asks so."""
    one = server()
    assert one.lookup(keys(31), {}) == [False]
    assert one.lookup(keys(31), {0: MemoryLayoutDesc([], [])}) == [False]
    one.store(keys(31), one.objects([0], [31]))
    assert one.lookup(keys(31), {}) == [True]
    assert one.lookup(keys(31), {0: MemoryLayoutDesc([], [])}) == [True]
    assert one.lookup(keys(31), layout(dtype=torch.bfloat16)) == [False]


def test_an_object_that_says_its_one_shape_only(server: Make) -> None:
    one = server()
    (plain,) = one.objects([0], [35])
    plain.metadata.shapes = plain.metadata.dtypes = None
    assert one.store(keys(35), [plain]).is_successful()
    assert one.load(keys(35), one.objects([1], [None])) == [True]


def test_listeners_hear_of_stored_accessed_and_deleted_objects(server: Make) -> None:
    heard: list[tuple[str, list[Any]]] = []

    class Listener:
        def on_l2_keys_stored(self, stored: list[Any], sizes: list[int]) -> None:
            assert sizes == [SIZE] * len(stored)
            heard.append(("stored", stored))

        def on_l2_keys_accessed(self, accessed: list[Any]) -> None:
            heard.append(("accessed", accessed))

        def on_l2_keys_deleted(self, deleted: list[Any]) -> None:
            heard.append(("deleted", deleted))

    one, other = server(), server()
    one.adapter.register_listener(Listener())
    asked = keys(41, 42)
    one.store(asked, one.objects([0, 1], [41, 42]))
    one.lookup([*asked, *keys(43)])
    one.adapter.delete([asked[0], *keys(43)])
    assert heard == [("stored", asked), ("accessed", asked), ("deleted", asked[:1])]
    assert one.adapter.get_usage().total_bytes_used == SIZE
    assert other.lookup(asked) == [False, True]


def test_a_model_that_the_server_was_not_told_of_is_read_when_it_is_met(server: Make, model_dir: Any) -> None:
    one = server({"mooncache.models": {}})
    named = str(model_dir)
    objects = one.objects([0], [51])
    wait_until(lambda: one.store(keys(51, model=named), objects).is_successful(), "its files were read")
    assert server({"mooncache.models": {named: named}}).lookup(keys(51, model=named)) == [True]


def test_an_object_without_a_known_model_fails_the_store_and_the_others_are_kept(server: Make) -> None:
    one = server()
    asked = [*keys(61), *keys(62, model="nobody/knows")]
    assert not one.store(asked, one.objects([0, 1], [61, 62])).is_successful()
    assert one.lookup(asked) == [True, False]
    assert one.load(asked, one.objects([2, 3], [None, None])) == [True, False]


def test_bytes_lie_in_the_pool_as_they_lie_in_l1(server: Make, faulty: FaultyPool) -> None:
    one = server()
    objects = one.objects([0], [71])
    one.store(keys(71), objects)
    assert list(faulty.blocks.values()) == [content(objects[0])]
    assert DTYPE.itemsize * 2 * 2 * 16 * 64 == SIZE
