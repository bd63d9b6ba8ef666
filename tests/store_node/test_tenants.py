"""The table of tenants at a node, and tenants of a real pool: sessions, limits, figures, purge."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncache
from mooncache.auth import load_cluster_token, parse_session_token, session_token, tenant_token
from mooncache.cli.app import run as cli
from mooncache.client.keys import to_block_key
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.errors import InvalidArgument, NoNodes, NotFound, Unauthenticated
from mooncache.runtime.tenant_limits import TenantLimits, TenantTable
from mooncache.store_node.metrics import TENANTS_SHOWN, tenant_families
from mooncache.store_node.tenants import OTHERS, NodeTenants, largest
from tests.conditions import wait_until

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.sampled_from(["version", "tenants", "ttl_ms", "team-a"])
)
BLOCK = b"\xa5" * 40_000


def _nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["version", "tenants", "ttl_ms", "team-a", "B"])
    return st.lists(values, max_size=3) | st.dictionaries(names, values, max_size=3)


class FakeServer:
    """The native server, as far as tenants go."""

    def __init__(self) -> None:
        self.limits: dict[str, dict[str, int]] = {}

    def set_limits(self, tenant: str, **limits: int) -> None:
        self.limits[tenant] = {name: value for name, value in limits.items() if value}

    def tend_tenants(self, max_slots: int) -> dict[int, dict[str, int]]:
        return {0: {"bytes": 0, "disk_bytes": 0, "hits": 9}, 7: {"bytes": 5, "disk_bytes": 1, "hits": 2}}

    def tenants(self) -> dict[int, str]:
        return {7: "team-a"}

    def purge(self, tenant_id: int, cursor: int) -> dict[str, int]:
        raise NotImplementedError

    def set_keys(self, tenant: str, keys: list[bytes]) -> None:
        raise NotImplementedError


def table_of(version: int, **tenants: TenantLimits) -> TenantTable:
    return TenantTable(version, tenants)


def test_the_newest_table_is_in_force_and_in_the_file(tmp_path: Path) -> None:
    server, path = FakeServer(), tmp_path / "tenants.json"
    node = NodeTenants(server, path, lambda: 5000)
    node.read_file()
    assert node.table.version == 0
    assert node.take(table_of(10, a=TenantLimits(ttl_ms=5), b=TenantLimits(bytes_per_s=7)))
    assert server.limits == {"a": {"ttl_ms": 5}, "b": {"bytes_per_s": 7}}
    assert not node.take(table_of(9)), "an older one is ignored"
    assert node.take(table_of(11, b=TenantLimits(bytes_per_s=7)))
    assert server.limits["a"] == {}, "limits that are no longer named end"

    again = NodeTenants(FakeServer(), path, lambda: 5000)
    again.read_file()
    assert again.table == node.table, "a restart finds them"


def test_an_edited_file_is_the_newest_table(tmp_path: Path) -> None:
    server, path = FakeServer(), tmp_path / "tenants.json"
    node = NodeTenants(server, path, lambda: 10**13)
    node.take(table_of(10, a=TenantLimits(memory_quota_bytes=1)))
    path.write_text(json.dumps({"version": 10, "tenants": {"a": {"memory_quota_bytes": 200}}}))
    node.read_file()
    assert server.limits["a"] == {"memory_quota_bytes": 200}
    assert node.table.version > 10
    version = node.table.version
    path.write_text("{")
    node.read_file()
    assert node.table.version == version, "a broken file changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"tenants": []}',
        '{"tenants": {"a": 5}}',
        '{"version": -1}',
        '{"version": 1.5}',
        '{"version": true}',
        '{"tenants": {"A b": {}}}',
        '{"tenants": {"a": {"no_such_limit": 1}}}',
        '{"tenants": {"a": {"ttl_ms": -1}}}',
        '{"tenants": {"a": {"ttl_ms": 1e3}}}',
        '{"tenants": {"a": {"encrypted": 2}}}',
        '{"tenants": {"a": {"ttl_ms": 99999999999999999999}}}',
    ],
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        TenantTable.from_text(text)


@given(st.text(max_size=300) | st.recursive(_SCALARS, _nested, max_leaves=8).map(json.dumps))
def test_any_text_is_a_table_or_refused(text: str) -> None:
    try:
        table = TenantTable.from_text(text)
    except InvalidArgument:
        return
    assert TenantTable.from_text(table.to_text()) == table
    assert TenantTable.from_message(table.to_message()) == table


@given(
    st.text(max_size=300)
    | st.from_regex(r"mcs1\.[a-z0-9.]{1,70}\.[0-9]{0,14}\.[0-9a-f]{60,66}", fullmatch=True)
)
def test_any_text_is_a_session_token_or_refused(text: str) -> None:
    try:
        token = parse_session_token(text)
    except Unauthenticated:
        return
    assert token.text == text
    assert 0 < token.end_unix_s < 10**12


def test_a_table_is_the_same_as_text_and_as_message() -> None:
    table = table_of(3).with_limits("team-a", TenantLimits(1, 2, 3, 4, 5, 6), 100)
    assert table.version == 100
    assert TenantTable.from_text(table.to_text()) == table
    assert TenantTable.from_message(table.to_message()) == table
    assert table.with_limits("team-a", TenantLimits(), 50) == TenantTable(101, {}), "versions only grow"


def test_figures_are_of_the_largest_tenants_and_the_rest(tmp_path: Path) -> None:
    node = NodeTenants(FakeServer(), tmp_path / "tenants.json", lambda: 0)
    node.tend()
    assert node.figures["team-a"] == {"bytes": 5, "disk_bytes": 1, "hits": 2}
    many = {f"t{n}": {"bytes": n, "disk_bytes": 0, "hits": 1} for n in range(30)} | {"": node.figures[""]}
    found = largest(many, 3)
    assert list(found) == ["t29", "t28", "t27", OTHERS]
    assert found[OTHERS] == {"bytes": sum(range(27)), "disk_bytes": 0, "hits": 27 + 9}


def test_metrics_name_few_tenants_and_the_others() -> None:
    many = {f"t{n}": {"bytes": n, "disk_bytes": 0, "hits": 1, "byte_ms": 2000 * n} for n in range(100)}
    found = {family.name: family for family in tenant_families(many)}
    held = {
        (sample.labels["tenant"], sample.labels["tier"]): sample.value
        for sample in found["mooncache_store_node_tenant_bytes"].samples
    }
    assert len(held) == 2 * (TENANTS_SHOWN + 1)
    assert held["t99", "memory"] == 99
    assert held[OTHERS, "memory"] == sum(range(80))
    seconds = found["mooncache_store_node_tenant_byte_seconds"].samples
    assert ("t99", 198.0) in {(s.labels["tenant"], s.value) for s in seconds}
    reads = found["mooncache_store_node_tenant_reads"].samples
    assert (OTHERS, "hit", 80.0) in {(s.labels["tenant"], s.labels["outcome"], s.value) for s in reads}


def test_session_tokens_of_a_while_are_equal_and_end(tmp_path: Path) -> None:
    from mooncache.auth import create_cluster_token

    cluster = create_cluster_token(tmp_path / "token")
    now = session_token(cluster, "team-a", 1_800_000_000.0)
    assert now == session_token(cluster, "team-a", 1_800_000_000.0 + 100)
    assert 900 <= now.end_unix_s - 1_800_000_000 <= 1800
    assert parse_session_token(now.text) == now
    assert now.key != session_token(cluster, "team-b", 1_800_000_000.0).key
    assert now.key.hex() not in repr(now)
    for text in ("", "mcs1.team-a.5", now.text[:-1], now.text + "0", tenant_token(cluster, "team-a").text):
        with pytest.raises(Unauthenticated):
            parse_session_token(text)


# --- a real pool ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("pool"), nodes=2, capacity_bytes=8 << 20, port=0
    )
    with EmbeddedCluster(settings) as running:
        yield running


def connect(cluster: EmbeddedCluster) -> mooncache.Client:
    return mooncache.connect(state_dir=str(cluster.settings.state_dir))


def session(cluster: EmbeddedCluster, tenant: str) -> str:
    return session_token(load_cluster_token(cluster.token_path), tenant, time.time()).text


def asked(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = cli([*words, "--state-dir", str(cluster.settings.state_dir), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out.strip() else None


def test_a_session_sees_its_tenants_blocks_alone(cluster: EmbeddedCluster) -> None:
    with connect(cluster) as own, own.for_tenant(session(cluster, "team-a")) as one:
        with own.for_tenant(session(cluster, "team-b")) as other:
            assert (one.tenant, own.tenant) == ("team-a", "default")
            assert one.put("secret", BLOCK)
            assert one.get("secret") == BLOCK
            for client in (other, own):
                assert client.get("secret") is None
                assert not client.exists("secret")
                assert client.match([to_block_key("secret")]).leading_blocks == 0
                assert not [entry for entry in client.list() if entry.key == to_block_key("secret")]
                assert client.remove_many(["secret"]).codes == (NotFound.code,)
                assert client.pin_many(["secret"], ttl_s=60).codes == (NotFound.code,)
                assert client.give_up([to_block_key("secret")]) == 0
            assert other.put("secret", b"of another"), "a block of the same key is another one"
            assert one.get("secret") == BLOCK
        with mooncache.connect(state_dir=str(cluster.settings.state_dir), tenant="team-a") as owner:
            assert owner.get("secret") == BLOCK, "the tenant's own token names the same blocks"


def test_an_expired_session_is_refused(cluster: EmbeddedCluster) -> None:
    late = session_token(load_cluster_token(cluster.token_path), "team-a", time.time() - 7200).text
    with connect(cluster) as own, own.for_tenant(late) as client:
        result = client.put_many(["late"], [BLOCK])
        assert result.codes[0] in {Unauthenticated.code, NoNodes.code, 400}
        assert own.get("late") is None


async def test_the_asyncio_client_acts_for_tenants_too(cluster: EmbeddedCluster) -> None:
    async with await mooncache.connect_async(state_dir=str(cluster.settings.state_dir)) as own:
        async with own.for_tenant(session(cluster, "team-c")) as one:
            assert await one.put("of c", BLOCK)
            assert await one.get("of c") == BLOCK
        assert await own.get("of c") is None
        assert await own.put("of the cluster", BLOCK), "closing it leaves the other open"


def test_limits_are_set_live_and_reach_every_node(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = asked(
        cluster, capsys, "tenant", "set", "team-q", "--quota", "200KiB", "--share", "100KiB"
    )
    assert code == 0
    assert len(document["node_ids"]) == 2
    code, document = asked(cluster, capsys, "tenant", "set", "team-q", "--ttl", "1h")
    assert (document["memory_quota_bytes"], document["ttl_ms"]) == (200 << 10, 3_600_000), "the rest stays"
    with connect(cluster) as own, own.for_tenant(session(cluster, "team-q")) as one:
        for number in range(40):
            assert one.put(f"q{number}", BLOCK)
        code, document = asked(cluster, capsys, "tenant", "ls")
        row = document["tenants"]["team-q"]
        assert row["figures"]["bytes"] <= 2 * (200 << 10), "on each of two nodes"
        assert row["figures"]["stored_blocks"] == 40
        assert row["figures"]["evicted_blocks"] >= 28
        assert row["limits"]["memory_share_bytes"] == 100 << 10
    kept = TenantTable.from_text((cluster.settings.state_dir / "tenants.json").read_text())
    assert kept.tenants["team-q"].memory_quota_bytes == 200 << 10


def test_an_edited_file_reaches_nodes_and_master(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cluster.settings.state_dir / "tenants.json"
    path.write_text(json.dumps({"tenants": {"team-f": {"memory_share_bytes": 12345}}}))

    def known() -> bool:
        found = asked(cluster, capsys, "tenant", "ls")[1]["tenants"].get("team-f")
        return found is not None and found["limits"]["memory_share_bytes"] == 12345

    wait_until(known, "the master has heard of it")


def test_a_purge_has_a_receipt(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with connect(cluster) as own, own.for_tenant(session(cluster, "team-p")) as one:
        assert all(one.put(f"p{number}", BLOCK) for number in range(20))
        assert own.put("stays", BLOCK)
        assert asked(cluster, capsys, "tenant", "purge", "team-p")[0] == 2, "not without --yes"
        assert one.get("p3") == BLOCK
        code, receipt = asked(cluster, capsys, "tenant", "purge", "team-p", "--yes")
        assert (code, receipt["complete"]) == (0, True)
        assert sum(node["blocks"] for node in receipt["nodes"]) == 20
        assert sum(node["bytes"] for node in receipt["nodes"]) == 20 * len(BLOCK)
        assert one.get_many([f"p{number}" for number in range(20)]).values == (None,) * 20
        assert own.get("stays") == BLOCK
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(receipt))
    where = ["--state-dir", str(cluster.settings.state_dir)]
    assert cli(["tenant", "check", str(file), *where]) == 0
    receipt["nodes"][0]["blocks"] += 1
    file.write_text(json.dumps(receipt))
    assert cli(["tenant", "check", str(file), *where]) == 1


def test_a_tenant_may_not_ask_for_others(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(tenant_token(load_cluster_token(cluster.token_path), "team-a").text)
    file.chmod(0o600)
    where = ["--state-dir", str(cluster.settings.state_dir), "--token-file", str(file)]
    for words in (["ls"], ["set", "team-b", "--quota", "1"], ["purge", "team-b", "--yes"]):
        assert cli(["tenant", *words, *where]) == 4, "denied"
