"""Configuration: sources and their order, units, and errors that name the right setting."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mooncache.config import Audience, Config, explain, load, parse_duration_s, parse_size_bytes, to_toml
from mooncache.config.audience import NAMED
from mooncache.config.removed import REMOVED
from mooncache.errors import ConfigInvalid


def test_later_sources_win_and_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "mooncache.toml"
    file.write_text(
        '[master]\nport = 1\nhost = "::1"\nlease_s = "9s"\n[store_node]\ncapacity_bytes = "2GiB"\n'
    )
    config = load(
        file, {"MOONCACHE_MASTER_PORT": "2", "MOONCACHE_MASTER_HOST": "0.0.0.0"}, {"master.port": 3}
    )
    assert (config.master.port, config.master.host, config.master.lease_s) == (3, "0.0.0.0", 9.0)
    assert config.store_node.capacity_bytes == 2 << 30
    rows = {row.name: row for row in explain(config)}
    assert rows["master.port"].source == "command line"
    assert rows["master.host"].source == "environment MOONCACHE_MASTER_HOST"
    assert rows["master.lease_s"].source == str(file)
    assert rows["master.slow_start_s"].source == "default"
    assert rows["master.port"].default == 7700


def test_every_setting_is_described_and_has_a_default() -> None:
    assert all(len(row.help) > 5 for row in explain(load(env={})))


def test_defaults_stay_on_this_machine() -> None:
    rows = {row.name: row.value for row in explain(load(env={}))}
    hosts = {
        name: value for name, value in rows.items() if name.endswith((".host", "data_host", "engine_host"))
    }
    assert len(hosts) == 9
    assert set(hosts.values()) == {"127.0.0.1"}


def test_state_dir_short_name(tmp_path: Path) -> None:
    assert load(env={"MOONCACHE_STATE_DIR": str(tmp_path)}).cluster.token_path == tmp_path / "cluster.token"
    both = load(env={"MOONCACHE_STATE_DIR": "/a", "MOONCACHE_CLUSTER_STATE_DIR": "/b"})
    assert both.cluster.state_dir == Path("/b")
    assert load(env={}).cluster.state_dir == Path("~/.mooncache").expanduser()


def test_config_file_from_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[client]\nreplicas = 2\n")
    assert load(env={"MOONCACHE_CONFIG": str(file)}).client.replicas == 2


def test_lists_and_paths() -> None:
    config = load(env={"MOONCACHE_CLUSTER_MASTER_TARGETS": "a:1, b:2", "MOONCACHE_TLS_CA_FILE": ""})
    assert config.cluster.master_targets == ("a:1", "b:2")
    assert config.tls.ca_file is None


@pytest.mark.parametrize(
    ("env", "overrides", "words"),
    [
        ({"MOONCACHE_MASTR_PORT": "1"}, {}, ["MOONCACHE_MASTR_PORT", "did you mean MOONCACHE_MASTER_PORT"]),
        ({"MOONCACHE_MASTER_PORT": "99999"}, {}, ["master.port", "MOONCACHE_MASTER_PORT", "65535"]),
        ({}, {"store_node.capacity_byte": 1}, ["did you mean store_node.capacity_bytes"]),
        ({}, {"store_node.capacity_bytes": "8 GiX"}, ["store_node.capacity_bytes", "8GiB"]),
        ({}, {"master.lease_s": 1}, ["heartbeat_interval_s < suspect_after_s < lease_s"]),
        ({}, {"coordination.backend": "zookeeper"}, ["coordination.backend", "embedded", "etcd"]),
        ({}, {"tls.require_client_cert": True}, ["ca_file"]),
    ],
)
def test_wrong_settings_are_named(
    env: dict[str, str], overrides: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(env=env, overrides=overrides)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    "text", ["port = 1", "[master\n", "[mastr]\nport = 1", "[master]\nprot = 1", "master = 3"]
)
def test_wrong_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigInvalid, match=r"c\.toml"):
        load(file, {})
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load(tmp_path / "absent.toml", {})


def test_secrets_are_not_shown() -> None:
    config = load(
        env={"MOONCACHE_CLIENT_TOKEN": "mcc1.swordfish", "MOONCACHE_COORDINATION_ETCD_PASSWORD": "hunter"}
    )
    shown = f"{explain(config)} {config!r} {to_toml(config)}"
    assert "swordfish" not in shown
    assert "hunter" not in shown
    with pytest.raises(ConfigInvalid) as caught:
        load(env={"MOONCACHE_CLIENT_TOKEN": "mcc1." + "f" * 300})
    assert "ffff" not in caught.value.message


def test_written_toml_reads_back(tmp_path: Path) -> None:
    config = load(
        env={}, overrides={"store_node.capacity_bytes": "1GiB", "cluster.master_targets": "a:1,b:2"}
    )
    file = tmp_path / "c.toml"
    file.write_text(to_toml(config))
    assert load(file, {}).model_dump() == config.model_dump()


def test_configuration_is_frozen() -> None:
    config: Config = load(env={})
    with pytest.raises(ValueError, match="frozen"):
        config.master.port = 1  # type: ignore[misc]


def test_units() -> None:
    sizes = {"0": 0, "1024": 1024, "1KiB": 1024, "1.5 kb": 1500, "2TiB": 2 << 40, 7: 7}
    assert [parse_size_bytes(text) for text in sizes] == list(sizes.values())
    durations = {"500ms": 0.5, "2min": 120.0, "1h": 3600.0, 3: 3.0, "1.5": 1.5}
    assert [parse_duration_s(text) for text in durations] == pytest.approx(list(durations.values()))
    for wrong in ("", "-1", "1.5", "1 XB", "1e9", "9" * 30, None, True, float("nan"), -1):
        with pytest.raises(ValueError, match="is not"):
            parse_size_bytes(wrong)


def test_each_setting_is_for_somebody() -> None:
    rows = explain(load(env={}))
    assert not NAMED - {row.name for row in rows}, "settings that are gone"
    counts = Counter(row.audience for row in rows)
    assert 20 <= counts[Audience.COMMON] <= 35 and counts[Audience.EXPERTS] >= 20


def test_a_setting_of_an_earlier_version_is_told_from_a_wrong_name(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[master]\ntask_concurrency = 4\n")
    for read in (
        lambda: load(file, env={}),
        lambda: load(env={"MOONCACHE_MASTER_TASK_CONCURRENCY": "4"}),
    ):
        with pytest.raises(ConfigInvalid, match="is no longer a setting"):
            read()
    assert not REMOVED & {row.name for row in explain(load(env={}))}
