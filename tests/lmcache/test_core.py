"""Names, settings and refusals, without LMCache."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from mooncache.connectors import lmcache
from mooncache.connectors.lmcache.core.names import chunk_name, describe, leading, object_name
from mooncache.connectors.lmcache.models import check_version
from mooncache.connectors.lmcache.settings import IN_EXTRA, IN_PARAMS, read_settings
from mooncache.errors import ConfigInvalid

CHUNK: dict[str, Any] = {"chunk_hash": "1f", "tags": None}
OBJECT: dict[str, Any] = {"kv_rank": 0, "group": 0, "salt": "", "chunk_hash": b"\x1f"}


def test_no_two_keys_have_one_name() -> None:
    names = [
        chunk_name("aa", **CHUNK),
        chunk_name("ab", **CHUNK),
        *(
            chunk_name("aa", **{**CHUNK, **other})
            for other in (
                {"chunk_hash": "1e"},
                {"tags": (("user", "a"),)},
                {"tags": (("user", 'a"], ["team", "b'),)},
                {"tags": (("user", "a"), ("team", "b"))},
                {"tags": (("team", "b"), ("user", "a"))},
                {"tags": (("user", 1),)},
                {"tags": (("user", "1"),)},
            )
        ),
        object_name("aa", **OBJECT),
        *(
            object_name("aa", **{**OBJECT, **other})
            for other in (
                {"kv_rank": 1},
                {"group": 1},
                {"salt": "s"},
                {"salt": '"'},
                {"chunk_hash": b"\x1e"},
                {"chunk_hash": b"\x1f\x00"},
            )
        ),
    ]
    assert all(one != other for one, other in combinations(names, 2))


def test_a_layout_has_types_and_shapes() -> None:
    assert describe([(2, 3, 16, 64)], ["torch.float16"]) == "float16 2x3x16x64"
    assert describe([(2, 3), (1, 5)], ["a", "b"]) == "a 2x3; b 1x5"


@pytest.mark.parametrize(
    ("present", "count"), [([], 0), ([True, True], 2), ([False, True], 0), ([True, False, True], 1)]
)
def test_leading(present: list[bool], count: int) -> None:
    assert leading(present) == count


@pytest.mark.parametrize("text", ["0.4.9", "0.5.5", "0.6.0", "1.0.0", "none"])
def test_other_versions_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"LMCache {text} .*from 0\.5\.6 on and before 0\.6\.0"):
        check_version(text)


def test_the_version_that_is_supported() -> None:
    assert check_version("0.5.6") == "0.5"
    assert check_version("0.5.7rc3") == "0.5"


def test_there_is_no_other_class() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Mooncache'"):
        _ = lmcache.Mooncache


def test_settings_of_others_stand_beside_ours_in_the_extra_configuration() -> None:
    settings = read_settings(
        {"save_chunk_meta": False, "mooncache.models": {"a": "/m"}, "mooncache.variant": "rope x4"}, IN_EXTRA
    )
    assert (settings.models, settings.variant) == ({"a": "/m"}, "rope x4")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"mooncache.modles": {}}, r"no setting mooncache\.modles .*mean mooncache\.models"),
        ({"models": {}}, r"no setting models .*begin with mooncache\."),
        ({"mooncache.models": "a=/m"}, r"must be an object"),
        ({"mooncache.models": {"a": ""}}, r"must be an object"),
        ({"mooncache.variant": 3}, r"mooncache\.variant must be text"),
        ({"mooncache.load_timeout_s": -1}, r"load_timeout_s"),
        ({"mooncache.break_even": True}, r"no setting mooncache\.break_even"),
    ],
)
def test_settings_that_cannot_be_used(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        read_settings(params, IN_PARAMS)
