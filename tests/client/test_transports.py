"""A client says which ways its blocks may take and why not the others: in calls, once in the log, in numbers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from mooncache import _native
from mooncache.auth import derive_tenant_key
from mooncache.client import engine as engine_module
from mooncache.client import figures
from mooncache.client.engine import ClientCore
from mooncache.client.results import ClusterView, NodeView
from mooncache.errors import Closed
from mooncache.runtime.logs import Event
from mooncache.store_node.metrics import rail_families
from tests.topology.fake_verbs import FakeVerbs

SECRET = b"s" * 32
BLOCK = bytes(1 << 20)
MakeEngine = Callable[..., ClientCore]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Event, str]]:
    """Warnings of the client, as (event, reason)."""
    lines: list[tuple[Event, str]] = []

    class Log:
        def warning(self, event: Event, *, reason: str) -> None:
            lines.append((event, reason))

    monkeypatch.setattr(engine_module, "_log", Log())
    return lines


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    """make(verbs, **settings of the client) -> a client of one node that offers RDMA over the fake devices."""
    servers: list[Any] = []
    engines: list[ClientCore] = []

    def made(verbs: FakeVerbs | None, *, locate: Any = None, **settings: Any) -> ClientCore:
        rdma: dict[str, Any] = {"rdma_enabled": False} if verbs is None else {"rdma_library": verbs.path}
        server = _native.StoreServer(
            {
                "node_id": "n",
                "host_id": "there",
                "secret": SECRET,
                "incarnation": 1,
                "capacity_bytes": 64 << 20,
            }
            | {"unix_path": "", **rdma}
        )
        server.start()
        servers.append(server)
        native = _native.Client(
            {"key": derive_tenant_key(SECRET, "t"), "tenant": "t", "host_id": "here"} | settings
        )
        engine = ClientCore(native, default_timeout_s=10.0, locate=locate)
        engines.append(engine)
        host, port = server.endpoints()["tcp_host"], server.endpoints()["tcp_port"]
        rails = () if verbs is None else ("fake0:1",)
        node = NodeView(0, "n", "there", 1, "active", host, port, "", 64 << 20, 64 << 20, rails=rails)
        engine.apply_view(ClusterView(epoch=1, nodes=(node,)))
        return engine

    yield made
    for engine in engines:
        engine.close()
    for server in servers:
        server.stop(1.0)


def rdma_of(engine: ClientCore) -> tuple[str, str]:
    (view,) = (way for way in engine.transports() if way.name == "rdma")
    return view.state, view.reason


def test_a_client_that_cannot_says_why_once(make: MakeEngine, reported: list[tuple[Event, str]]) -> None:
    engine = make(FakeVerbs(1), rdma_library="libnothing-of-this-name.so")
    assert rdma_of(engine)[0] == "idle"
    assert reported == []
    for number in range(3):
        assert engine.put_many([f"k{number}"], [BLOCK], 1, None).ok
    state, reason = rdma_of(engine)
    assert state == "unavailable"
    assert "RDMA unavailable, because libnothing-of-this-name.so cannot be opened" in reason
    assert reported == [(Event.CLIENT_RDMA_UNAVAILABLE, reason)]
    engine.close()
    assert len(reported) == 1


def test_a_client_that_closes_at_once_has_said_it_too(
    make: MakeEngine, reported: list[tuple[Event, str]]
) -> None:
    engine = make(FakeVerbs(1), rdma_library="libnothing-of-this-name.so")
    assert engine.put_many(["k"], [BLOCK], 1, None).ok
    engine.close()
    assert [event for event, _ in reported] == [Event.CLIENT_RDMA_UNAVAILABLE]


def test_a_client_that_can_is_ready_and_quiet(make: MakeEngine, reported: list[tuple[Event, str]]) -> None:
    verbs = FakeVerbs(1)
    engine = make(verbs, rdma_library=verbs.path)
    assert engine.put_many(["k"], [BLOCK], 1, None).ok
    assert rdma_of(engine) == ("ready", "")
    assert [way.name for way in engine.transports()] == ["shm", "rdma", "tcp"]
    stats = engine.stats()
    assert stats["rdma_peer_n_bytes"] == len(BLOCK)
    assert (stats["rdma_peer_n_failures"], stats["rdma_peer_n_fallbacks"]) == (0, 0)
    assert reported == []


def test_a_failure_is_counted_for_the_peer(make: MakeEngine) -> None:
    verbs = FakeVerbs(1)
    engine = make(verbs, rdma_library=verbs.path)
    assert engine.put_many(["k"], [BLOCK], 1, None).ok
    verbs.cut(0, True)
    assert engine.put_many(["l"], [BLOCK], 1, None).ok, "over TCP"
    stats = engine.stats()
    assert stats["rdma_peer_n_failures"] >= 1
    assert stats["rdma_peer_n_fallbacks"] == stats["rdma_fallbacks"] == 1
    found = figures.figures(stats)
    assert found["client_peer_fallbacks", "n"] == 1
    assert found["client_rail_failures", "fake0:1"] >= 1
    verbs.cut(0, False)


def test_where_no_node_offers_it_nobody_is_told(make: MakeEngine, reported: list[tuple[Event, str]]) -> None:
    engine = make(None, locate=lambda *_: b"", rdma_library="libnothing-of-this-name.so")
    assert engine.put_many(["k"], [BLOCK], 1, None).ok
    engine.close()
    assert reported == []


@pytest.fixture
def authority(tmp_path: Path) -> str:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    key, ca = tmp_path / "key.pem", tmp_path / "ca.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=ca")
    command = ["openssl", "req", "-x509", *curve, "-keyout", str(key), "-out", str(ca)]
    subprocess.run(command, check=True, capture_output=True)
    return str(ca)


@pytest.mark.parametrize("tls", [False, True])
def test_what_the_configuration_says_is_no_trouble(
    tls: bool, authority: str, reported: list[tuple[Event, str]]
) -> None:
    settings: dict[str, Any] = {"tls": True, "tls_ca": authority} if tls else {"rdma_enabled": False}
    native = _native.Client({"key": derive_tenant_key(SECRET, "t"), "tenant": "t"} | settings)
    engine = ClientCore(native, default_timeout_s=1.0, locate=None)
    engine.apply_view(ClusterView())
    state, reason = rdma_of(engine)
    assert (state, ("not encrypted" if tls else "rdma.enabled") in reason) == ("off", True)
    engine.close()
    assert reported == []
    with pytest.raises(Closed):
        engine.transports()


STATS = {
    "tcp_bytes": 5,
    "rdma_bytes": 7,
    "miss_checksum": 1,
    "put_items": 9,
    "rdma_fallbacks": 2,
    "rdma_rail_mlx5_0:1_bytes": 7,
    "rdma_rail_mlx5_0:1_failures": 3,
    "rdma_rail_mlx5_0:1_up": 1,
    "rdma_peer_node_bytes_bytes": 7,
    "rdma_peer_node_bytes_failures": 4,
}


class Fake:
    """A client that has counted."""

    def __init__(self, stats: dict[str, int] | None) -> None:
        self._stats = stats

    def stats(self) -> dict[str, int]:
        if self._stats is None:
            raise Closed("closed")
        return self._stats


def scrape(client: Any) -> str:
    registry = CollectorRegistry()
    registry.register(figures.ClientCollector("mooncache_x_", lambda: client))
    return generate_latest(registry).decode()


def test_names_become_families_and_labels() -> None:
    page = scrape(Fake(STATS))
    for line in (
        'mooncache_x_client_bytes_total{way="rdma"} 7.0',
        'mooncache_x_client_misses_total{reason="checksum"} 1.0',
        'mooncache_x_client_fallbacks_total{way="rdma"} 2.0',
        'mooncache_x_client_rail_failures_total{rail="mlx5_0:1"} 3.0',
        'mooncache_x_client_rail_up{rail="mlx5_0:1"} 1.0',
        'mooncache_x_client_peer_bytes_total{node="node_bytes"} 7.0',
        'mooncache_x_client_peer_failures_total{node="node_bytes"} 4.0',
    ):
        assert line in page
    assert "put_items" not in page


def test_without_a_client_the_page_is_without_it() -> None:
    assert scrape(None) == "" == scrape(Fake(None))


def test_every_number_about_rdma_is_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    for family in figures.FAMILIES:
        assert f"`{family}" in page, family
    for metric in rail_families([], lambda *_: {}):
        assert f"`{metric.name}" in page, metric.name


def test_nodes_beyond_the_limit_share_a_label() -> None:
    found = figures.figures({f"rdma_peer_n{number:03}_bytes": 1 for number in range(figures.PEERS_MAX + 10)})
    assert len(found) == figures.PEERS_MAX + 1
    assert found["client_peer_bytes", figures.OTHERS] == 10


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1000), max_size=3), max_size=6))
def test_growth_adds_up_to_what_was_counted(steps: list[dict[str, int]]) -> None:
    """Counters that only grow arrive whole, however often they are read."""
    total: dict[str, int] = {}
    before: figures.Figures = {}
    seen: dict[str, int] = {}
    for step in steps:
        for label, amount in step.items():
            total[label] = total.get(label, 0) + amount
        now = {("client_bytes", label): value for label, value in total.items()}
        for (_, label), amount in figures.growth(before, now).items():
            seen[label] = seen.get(label, 0) + amount
        before = now
    assert seen == {label: value for label, value in total.items() if value}


def test_a_counter_that_shrank_begins_anew() -> None:
    key = ("client_peer_bytes", "n")
    assert figures.growth({key: 100}, {key: 30}) == {key: 30}
    assert figures.growth({(figures.RAIL_UP, "r"): 0}, {(figures.RAIL_UP, "r"): 1}) == {}
