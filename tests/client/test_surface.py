"""The public surface is frozen: a change here is a decision, written down in the release notes."""

from __future__ import annotations

import inspect

import pytest

import mooncache
from mooncache.client.aio import AsyncClient
from mooncache.client.sync import Client

TOP_LEVEL = {
    "AsyncBlockWatch",
    "AsyncClient",
    "AsyncReservation",
    "AsyncReservationBatch",
    "BatchResult",
    "BlockEntry",
    "BlockStat",
    "BlockWatch",
    "Client",
    "ClusterView",
    "StridedBuffer",
    "GetResult",
    "GetValues",
    "GetViews",
    "MatchResult",
    "MooncacheError",
    "NodeView",
    "PutResult",
    "RegisteredBuffer",
    "Reservation",
    "ReservationBatch",
    "WatchNews",
    "WatchState",
    "__version__",
    "connect",
    "connect_async",
    "get_cmake_path",
    "get_include",
    "get_proto_path",
}
METHODS = {
    "close",
    "cluster",
    "exists",
    "exists_many",
    "for_tenant",
    "get",
    "get_into",
    "get_iov",
    "get_many",
    "get_many_into",
    "get_many_views",
    "get_view",
    "give_up",
    "list",
    "match",
    "node_stat",
    "nodes",
    "pin",
    "pin_many",
    "ping",
    "prefetch",
    "put",
    "put_iov",
    "put_many",
    "register_buffer",
    "remove",
    "remove_many",
    "report_wrong",
    "reserve",
    "reserve_many",
    "stat",
    "stat_many",
    "stats",
    "transports",
    "tenant",
    "unpin",
    "unpin_many",
    "watch",
}


def public(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def test_top_level_names() -> None:
    assert set(mooncache.__all__) == TOP_LEVEL
    for name in TOP_LEVEL:
        assert getattr(mooncache, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(mooncache, "no_such_name")  # noqa: B009


def test_both_clients_offer_the_same() -> None:
    assert public(Client) == METHODS
    assert public(AsyncClient) == METHODS | {"connect"}


@pytest.mark.parametrize("name", sorted(METHODS - {"tenant", "list"}))
def test_both_clients_take_the_same_arguments(name: str) -> None:
    sync = inspect.signature(getattr(Client, name)).parameters
    other = inspect.signature(getattr(AsyncClient, name)).parameters
    assert [(p.name, p.kind, p.default) for p in sync.values()] == [
        (p.name, p.kind, p.default) for p in other.values()
    ]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_everything_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(Client, name))
    assert inspect.getdoc(getattr(AsyncClient, name))
