"""Workers and servers that differ in what a chunk's bytes mean never find each other's chunks; others do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncache import tiny_model
from tests.lmcache.package import need_lmcache

need_lmcache()

from tests.lmcache.servers import DTYPE, SHAPE, keys, layout  # noqa: E402

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights."""
    return tiny_model.build(tmp_path_factory.mktemp("other") / "tiny", layers=2, seed=9)


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 1, "world": 2},
        {"world": 2},
        {"dtype": torch.bfloat16},
        {"chunk": 32},
        {"heads": 8},
        {"pre_caching_hash_algorithm": "sha256"},
        {"extra": {"mooncache.variant": "rope x4"}},
    ],
    ids=str,
)
def test_workers_that_differ(worker: Make, other: dict[str, Any]) -> None:
    writer, reader, like = worker(), worker(**other), worker()
    asked = writer.keys(1)
    writer.store(asked, writer.chunks(1))
    assert reader.remote.batched_contains(reader.keys(1)) == 0
    assert reader.load(reader.keys(1)) == [None]
    assert like.remote.batched_contains(like.keys(1)) == 1


def test_two_models_of_one_name_do_not_share(worker: Make, model_dir: Path, other_model: Path) -> None:
    ours, theirs, same = (
        worker({"mooncache.models": {"served": str(folder)}}, model="served")
        for folder in (model_dir, other_model, model_dir)
    )
    asked = ours.keys(11)
    ours.store(asked, ours.chunks(11))
    assert theirs.remote.batched_contains(asked) == 0
    assert same.remote.batched_contains(asked) == 1


def test_tags_of_requests_separate(worker: Make) -> None:
    one = worker()
    asked = one.keys(21, tags={"user": "a"})
    one.store(asked, one.chunks(21))
    assert one.remote.batched_contains(asked) == 1
    for tags in ({}, {"user": "b"}, {"user": "a", "team": "x"}, {"user": 'a"], ["team", "x'}):
        assert one.remote.batched_contains(one.keys(21, tags=tags)) == 0


@pytest.mark.parametrize("other", [{"rank": 1}, {"group": 1}, {"salt": "user"}], ids=str)
def test_objects_of_other_keys(server: Make, other: dict[str, Any]) -> None:
    one = server()
    descs = {group: each for group in (0, 1) for each in layout().values()}
    assert one.store(keys(31), one.objects([0], [31])).is_successful()
    assert one.lookup(keys(31), descs) == [True]
    assert one.lookup(keys(31, **other), descs) == [False]
    assert one.load(keys(31, **other), one.objects([1], [None])) == [False]


@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPE, torch.bfloat16), (torch.Size([2, 2, 32, 32]), DTYPE)], ids=str
)
def test_objects_of_other_layouts_with_as_many_bytes(server: Make, shape: torch.Size, dtype: Any) -> None:
    one = server()
    assert one.store(keys(41), one.objects([0], [41])).is_successful()
    assert one.lookup(keys(41), layout(shape, dtype)) == [False]
    assert one.load(keys(41), [one.object(1, None, shape, dtype)]) == [False]


def test_servers_with_other_weights_or_another_variant(server: Make, other_model: Path) -> None:
    one = server()
    assert one.store(keys(51), one.objects([0], [51])).is_successful()
    assert server({"mooncache.models": {"tiny": str(other_model)}}).lookup(keys(51)) == [False]
    assert server({"mooncache.variant": "lora a"}).lookup(keys(51)) == [False]
    assert server().lookup(keys(51)) == [True]


def test_a_worker_and_a_server_do_not_meet(worker: Make, server: Make, model_dir: Path) -> None:
    """Their chunks have other bytes in other order."""
    one, other = worker(), server({"mooncache.models": {str(model_dir): str(model_dir)}})
    one.store(one.keys(61), one.chunks(61))
    assert other.lookup(keys(61, model=str(model_dir))) == [False]
