"""Who wrote a block, at real nodes: in memory, on disks, in kept memory, in copies; and the recall of a writer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncache
from mooncache import _native
from mooncache.auth import load_cluster_token, session_token
from mooncache.cli.app import run as cli
from mooncache.client.host import host_id
from mooncache.client.writer import writer_settings
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.config import load
from mooncache.store_node.writers import TEXT_BYTES_MAX, WRITERS_MAX, NodeWriters, parse_names
from tests.conditions import wait_until
from tests.store_node.questions import asked, writer

MIB = 1 << 20
BLOCK = 256 << 10


def value_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK // 4)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(
        ClusterSettings(state_dir=tmp_path / "state", nodes=2, capacity_bytes=32 * MIB, port=0)
    ) as running:
        yield running


def rows(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    code, document = asked(cluster, capsys, "writers")
    assert code == 0
    return {row["instance"] or "-": row for row in document["writers"]}


def test_a_recall_takes_one_writers_blocks_and_no_others(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(cluster, "good") as good, writer(cluster, "bad") as bad:
        token = session_token(load_cluster_token(cluster.token_path), "team-a", time.time()).text
        with bad.for_tenant(token) as of_team:
            assert of_team.put("t", value_of(99)), "blocks of all tenants are the same engine's"
            for number in range(12):
                assert good.put(f"g{number}", value_of(number))
                assert bad.put(f"b{number}", value_of(number))
            assert not bad.put("g3", value_of(3)), "it is there already, and stays the first one's"
            found = rows(cluster, capsys)
            assert {name: row["block_count"] for name, row in found.items()} == {"good": 12, "bad": 13}
            assert found["bad"]["build"] == "bad 1.0"
            assert found["bad"]["first_unix_s"] <= found["bad"]["last_unix_s"] <= time.time() + 1
            assert asked(cluster, capsys, "stat", "g3")[1]["origin"]["instance"] == "good"
            assert bad.pin_many(["b0"], ttl_s=60).codes == (0,)

            assert asked(cluster, capsys, "recall", "--writer", "bad")[0] == 2, "not without --yes"
            code, counted = asked(cluster, capsys, "recall", "--writer", "bad", "--dry-run")
            assert (code, counted["block_count"]) == (0, 13)
            assert bad.exists("b1"), "a dry run removes nothing"
            code, none = asked(cluster, capsys, "recall", "--writer", "bad", "--until", "1h", "--yes")
            assert (code, none["block_count"]) == (0, 0), "written later"
            code, receipt = asked(
                cluster, capsys, "recall", "--writer", found["bad"]["writer"], "--since", "1h", "--yes"
            )
            assert (code, receipt["complete"], receipt["block_count"]) == (0, True, 13)
            assert sum(node["memory_bytes"] for node in receipt["nodes"]) == 13 * BLOCK
            assert [each["instance"] for each in receipt["writers"]] == ["bad"]
            assert not any(bad.exists(f"b{number}") for number in range(12)), "the pinned one, too"
            assert of_team.get("t") is None
            assert all(bytes(good.get(f"g{number}") or b"") == value_of(number) for number in range(12))
            assert set(rows(cluster, capsys)) == {"good"}
            time.sleep(1.1)  # seconds count; a block of the second of the recall is refused
            assert bad.put("b0", value_of(0)), "it may go on writing"
            assert rows(cluster, capsys)["bad"]["block_count"] == 1
    assert asked(cluster, capsys, "recall", "--writer", "nobody", "--yes")[0] == 1
    acts = asked(cluster, capsys, "audit", "--what", "recall")[1]["entries"]
    done = [act["details"]["block_count"] for act in acts if "block_count" in act["details"]]
    assert done == ["13", "0", "13"], "each is in the audit log"


def test_refused_writers_are_refused_for_a_while(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(cluster, "good") as good, writer(cluster, "bad") as bad:
        assert bad.put("b", value_of(1))
        code, _ = asked(cluster, capsys, "recall", "--writer", "bad", "--yes", "--refuse", "1h")
        assert code == 0
        assert bad.put_many(["b"], [value_of(1)]).codes != (0,)
        assert good.put("b", value_of(1))
        assert bytes(bad.get("b") or b"") == value_of(1)


def test_a_node_that_does_not_answer_makes_no_clean_receipt(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(cluster, "bad") as bad:
        for number in range(12):
            assert bad.put(f"b{number}", value_of(number))
        cluster.kill("node-2")
        code, receipt = asked(cluster, capsys, "recall", "--writer", "bad", "--yes", "--timeout", "5s")
        by_name = {node["node_id"]: node for node in receipt["nodes"]}
        assert (code, receipt["complete"]) == (1, False)
        assert by_name["node-2"]["code"] != "OK"
        assert by_name["node-1"]["code"] == "OK"
        assert by_name["node-1"]["block_count"] == receipt["block_count"] > 0
        assert asked(cluster, capsys, "writers")[0] == 1, "a list that is not whole says so"


def test_a_moved_block_keeps_its_first_writer(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(cluster, "first") as first:
        for number in range(12):
            assert first.put(f"f{number}", value_of(number))
        before = rows(cluster, capsys)["first"]
        assert set(before["node_ids"]) == {"node-1", "node-2"}
        where = ["--state-dir", str(cluster.settings.state_dir)]
        assert cli(["drain", "node-1", *where, "--timeout", "60s"]) == 0
        after = wait_until(
            lambda: (found := rows(cluster, capsys)["first"])["node_ids"] == ["node-2"] and found,
            "all blocks lie on the other node",
        )
        assert after["block_count"] == 12
        assert (after["first_unix_s"], after["last_unix_s"]) == (
            before["first_unix_s"],
            before["last_unix_s"],
        )
        assert set(rows(cluster, capsys)) == {"first"}, "the copier is no writer"
        code, receipt = asked(cluster, capsys, "recall", "--writer", "first", "--yes")
        assert (code, receipt["block_count"]) == (0, 12)


def follows(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], blocks: int) -> bool:
    """The disk has so many blocks."""
    return sum(row["disk_block_count"] for row in rows(cluster, capsys).values()) >= blocks


def tier_of(client: mooncache.Client, key: str) -> str:
    found = client.stat(key)
    return found.tier if found is not None else ""


def _answers(client: mooncache.Client, key: str) -> bool:
    try:
        return client.exists(key)
    except mooncache.MooncacheError:
        return False


def _named_in_files(folder: Path, names: Sequence[str]) -> bool:
    texts = [path.read_text() for path in folder.rglob("writers-*.json")]
    return bool(texts) and all(name in texts[0] for name in names)


def test_recalled_blocks_of_a_disk_stay_gone_after_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ClusterSettings(
        state_dir=tmp_path / "state", nodes=1, capacity_bytes=16 * MIB, ssd_bytes=256 * MIB, port=0
    )
    with EmbeddedCluster(settings) as cluster, writer(cluster, "good") as good, writer(cluster, "bad") as bad:
        keys: list[str] = []
        for number in range(120):  # 30 MiB through 16
            client, name = (good, "g") if number % 2 else (bad, "b")
            keys.append(f"{name}{number}")
            client.put(keys[-1], value_of(number))
            if number % 4 == 3 and number > 64:  # a put never waits for a disk: it gets the time to follow
                wait_until(partial(follows, cluster, capsys, number - 60), "the disk follows", every_s=0.01)
        on_disk = [key for key in keys if tier_of(good, key) == "ssd"]
        bad_below = [key for key in on_disk if key[0] == "b"]
        assert len(bad_below) > 5
        assert len(on_disk) - len(bad_below) > 5
        # A node that is killed before it has written the names, as it does every other second, knows numbers alone.
        wait_until(partial(_named_in_files, settings.state_dir, ("good", "bad")), "the names are in the file")
        cluster.kill("node-1")
        cluster.restart("node-1")
        wait_until(partial(_answers, good, on_disk[0]), "the node is back")
        found = wait_until(
            lambda: (seen := rows(cluster, capsys)) and seen.get("bad", {}).get("disk_block_count") and seen,
            "its disks are read, and names are known",
        )
        assert found["bad"]["disk_block_count"] >= len(bad_below)
        assert found["bad"]["build"] == "bad 1.0", "its name was in the file"
        assert "-" not in found, "every record says its writer"
        origin = asked(cluster, capsys, "stat", bad_below[0])[1]["origin"]
        assert origin["instance"] == "bad"
        assert abs(origin["written_unix_s"] - time.time()) < 600
        code, none = asked(cluster, capsys, "recall", "--writer", "bad", "--until", "1h", "--dry-run")
        assert (code, none["disk_block_count"]) == (0, 0), "the record says when it was written"
        assert bytes(good.get(bad_below[0]) or b"") == value_of(int(bad_below[0][1:])), "it comes up"
        assert asked(cluster, capsys, "stat", bad_below[0])[1]["origin"] == origin, "and keeps its writer"

        code, receipt = asked(cluster, capsys, "recall", "--writer", "bad", "--yes")
        assert (code, receipt["complete"]) == (0, True)
        assert receipt["disk_block_count"] >= len(bad_below) - 1
        assert not any(good.exists(key) for key in keys if key[0] == "b")
        cluster.kill("node-1")
        cluster.restart("node-1")
        good_below = [key for key in on_disk if key[0] == "g"]
        for key in good_below:
            wait_until(partial(_answers, good, key), f"{key} of the disk")
        assert not [key for key in keys if key[0] == "b" and good.exists(key)], "they came back"
        assert set(rows(cluster, capsys)) == {"good"}
        assert bytes(good.get(good_below[0]) or b"") == value_of(int(good_below[0][1:]))


def test_kept_memory_keeps_its_writers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ClusterSettings(
        state_dir=tmp_path / "state",
        nodes=1,
        capacity_bytes=16 * MIB,
        port=0,
        keep_memory=True,  # its end ends the holder, too
    )
    with EmbeddedCluster(settings) as cluster, writer(cluster, "good") as good, writer(cluster, "bad") as bad:
        assert all(good.put(f"g{number}", value_of(number)) for number in range(5))
        assert all(bad.put(f"b{number}", value_of(number)) for number in range(5))
        before = rows(cluster, capsys)
        names = cluster.settings.state_dir / "writers-node-1.json"
        wait_until(lambda: names.exists() and "bad 1.0" in names.read_text(), "names are in their file")
        cluster.kill("node-1")
        cluster.restart("node-1")
        wait_until(partial(_answers, good, "g0"), "the node is back, with its memory")
        wait_until(lambda: asked(cluster, capsys, "writers")[0] == 0, "the master knows its new port")
        after = rows(cluster, capsys)
        assert {name: row["writer"] for name, row in after.items()} == {
            name: row["writer"] for name, row in before.items()
        }
        assert after["bad"]["block_count"] == 5
        assert after["bad"]["last_unix_s"] == before["bad"]["last_unix_s"]
        code, receipt = asked(cluster, capsys, "recall", "--writer", "bad", "--yes")
        assert (code, receipt["block_count"]) == (0, 5)
        assert good.exists("g4")


def test_a_process_is_one_writer_under_each_name() -> None:
    one = writer_settings("engine", "vllm 1")
    assert one == writer_settings("engine", "vllm 1")
    assert one["writer_id"] != writer_settings("other", "vllm 1")["writer_id"]
    long = writer_settings("é" * 200, "x")
    assert long["writer_instance"] == "?" * TEXT_BYTES_MAX


class FakeServer:
    """The native server, as far as names go."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self.found = found
        self.known: list[tuple[object, ...]] = []

    def writers(self) -> list[dict[str, Any]]:
        return self.found

    def know_writer(self, *row: object) -> bool:
        self.known.append(row)
        return True


def test_names_come_back_from_their_file(tmp_path: Path) -> None:
    row = {"id": 7, "instance": "vllm-7", "build": "vllm 1", "started_unix_s": 9, "blocks": 3}
    nameless = {"id": 8, "instance": "", "build": "", "started_unix_s": 0, "blocks": 1}
    path = tmp_path / "writers.json"
    node = NodeWriters(FakeServer([row, nameless]), path)  # type: ignore[arg-type]
    assert node.keep_names()
    assert not node.keep_names(), "nothing changed"
    again = FakeServer([])
    NodeWriters(again, path).read_names()  # type: ignore[arg-type]
    assert again.known == [(7, "vllm-7", "vllm 1", 9)]
    path.write_text("{")
    NodeWriters(again, path).read_names()  # type: ignore[arg-type]
    assert len(again.known) == 1, "a file that is none changes nothing"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=80) | st.just("00000000000000ff"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["writers", "id", "instance", "build", "started_unix_s"]), inner, max_size=5
        )
    ),
    max_leaves=20,
)


@given(st.binary(max_size=200) | _VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_file_gives_rows_that_fit_or_none(content: bytes) -> None:
    for row in parse_names(content) or []:
        assert 0 < row["id"] < 1 << 64
        assert len(row["instance"]) <= TEXT_BYTES_MAX
        assert row["instance"].isascii()
        assert 0 <= row["started_unix_s"] < 1 << 64


def test_a_full_table_makes_writers_unknown(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of more writers than the table has places for stores a block on one node."""
    with writer(cluster, "spare") as client:
        node = next(node for node in client.nodes() if node.node_id == "node-1")
        key = load_cluster_token(cluster.token_path).tenant_key
        for number in range(WRITERS_MAX + 5):
            native = _native.Client(
                {
                    "key": key,
                    "tenant": "default",
                    "host_id": host_id(),
                    "writer_id": number + 1,
                    "writer_instance": f"w{number}",
                    "lanes_per_node": 1,
                }
            )
            native.set_map(1, [_entry(node)])
            block = number.to_bytes(32, "big")
            assert native.put([block], [b"x" * 1000], 1, 10.0, None, node.index)[0][0] == 0
            native.close()
    found = rows(cluster, capsys)
    assert found["-"]["block_count"] >= 5, "they are not attributed to anybody"
    assert sum(row["block_count"] for row in found.values()) == WRITERS_MAX + 5
    assert len(found) == WRITERS_MAX + 1


def _entry(node: Any) -> dict[str, object]:
    from mooncache.store_node.copier import map_entry

    return map_entry(node)


def test_an_engines_instance_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncache.kvcache.pool_link import INSTANCE_VARIABLE, instance_name

    monkeypatch.setenv(INSTANCE_VARIABLE, "vllm-7")
    assert load() is not None
    assert instance_name("other") == "vllm-7"
    monkeypatch.delenv(INSTANCE_VARIABLE)
    assert instance_name("other") == "other"
