"""What `mooncache upgrade --check` says of clusters that were made up, and who chooses the interpreter of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mooncache.cli.core.upgrade_check import RunningProcess, check, in_order, release_of
from mooncache.cli.upgrade import settings_problem
from mooncache.cluster.interpreter import (
    INTERPRETER_FILE,
    choose_interpreter,
    forget_interpreter,
    interpreter_of,
)
from mooncache.cluster.processes import ServiceKind
from mooncache.errors import ConfigInvalid
from mooncache.runtime.formats import FORMATS
from mooncache.topology.core.findings import BAD, OK, WARN, Finding, Grade
from tests.conditions import wait_until

NODE_FORMATS = dict(FORMATS)
CLUSTER = (
    RunningProcess("gateway", ServiceKind.GATEWAY, "0.1.0"),
    RunningProcess("conductor", ServiceKind.CONDUCTOR, "0.1.0"),
    RunningProcess("decode-2", ServiceKind.WORKER, "0.1.0", model="m", generates=True),
    RunningProcess("decode-1", ServiceKind.WORKER, "0.1.0", model="m", generates=True),
    RunningProcess("node-1", ServiceKind.STORE_NODE, "0.1.0", NODE_FORMATS),
    RunningProcess("master", ServiceKind.MASTER, "0.1.0"),
)
ORDER = ["master", "node-1", "decode-1", "decode-2", "conductor", "gateway"]


def of(what: str, found: list[Finding]) -> list[tuple[Grade, str]]:
    return [(finding.grade, finding.found) for finding in found if finding.what == what]


def changed(name: str, **fields: object) -> list[RunningProcess]:
    return [replace(process, **fields) if process.name == name else process for process in CLUSTER]  # type: ignore[arg-type]


def test_nodes_and_engines_go_before_gateways_and_come_back_after_them() -> None:
    assert [process.name for process in in_order(CLUSTER, "0.2.0")] == ORDER
    ahead = [replace(process, version="0.2.0") for process in CLUSTER]
    assert [process.name for process in in_order(ahead, "0.1.0")] == ORDER[::-1]
    half = changed("master", version="0.2.0")
    assert [process.name for process in in_order(half, "0.2.0")] == ORDER[1:], "what is there is left alone"
    assert [process.name for process in in_order(half, "0.1.0")] == ["master"]


def test_all_is_well() -> None:
    found = check(CLUSTER, "0.2.0", FORMATS)
    assert {finding.grade for finding in found} == {OK}
    assert of("versions", found) == [(OK, "6 of 6: 0.1.0 to 0.2.0")]
    assert of("versions", check(CLUSTER, "0.1.0", FORMATS)) == [(OK, "all 6 processes have 0.1.0 already")]


@pytest.mark.parametrize(
    ("version", "grade"), [("0.2.7", OK), ("0.3.0", BAD), ("1.1.0", BAD), ("0.0.9", OK), ("", WARN)]
)
def test_one_minor_version_at_a_time(version: str, grade: Grade) -> None:
    found = of("versions", check(changed("master", version=version), "0.1.0", FORMATS))
    assert [grade for grade, _ in found] == [grade]


@pytest.mark.parametrize(
    ("name", "theirs", "what", "grade"),
    [
        ("data_plane", 2, "data plane", BAD),
        ("control_minor", FORMATS["control_minor"] + 1, "formats", OK),
        ("control_minor", FORMATS["control_minor"] + 2, "control calls", BAD),
        ("disk", 2, "disks", BAD),
        ("disk", 0, "formats", OK),
        ("kept_memory", 2, "kept memory", WARN),
        ("kept_memory", 0, "kept memory", WARN),
    ],
)
def test_formats_of_a_node(name: str, theirs: int, what: str, grade: Grade) -> None:
    found = check(changed("node-1", formats={**NODE_FORMATS, name: theirs}), "0.1.0", FORMATS)
    assert [grade for grade, _ in of(what, found)] == [grade]


def test_what_a_node_does_not_say_is_said() -> None:
    ((grade, text),) = of("formats", check(changed("node-1", formats={}), "0.1.0", FORMATS))
    assert grade == WARN and "node-1" in text


def test_settings_that_the_other_version_refuses() -> None:
    found = of(
        "settings", check(changed("node-1", settings_problem="There is no setting x."), "0.2.0", FORMATS)
    )
    assert found == [(BAD, "node-1: There is no setting x.")]


def test_the_only_engine_of_a_model_and_processes_of_other_hosts() -> None:
    found = check(changed("decode-2", model="other"), "0.2.0", FORMATS)
    assert [grade for grade, _ in of("engines", found)] == [WARN, WARN]
    ((grade, text),) = of("elsewhere", check(changed("node-1", here=False), "0.2.0", FORMATS))
    assert grade == WARN and text.endswith(": node-1")


def test_numbers_of_a_version() -> None:
    assert release_of("0.1") == (0, 1)
    assert release_of("1.2.3rc1") == (1, 2)
    assert release_of("unknown") is None


def test_settings_of_a_running_process() -> None:
    assert settings_problem(os.getpid()) == ""
    assert settings_problem(2**22 + 1) == "", "it has ended"


def test_settings_of_a_process_that_this_version_does_not_know() -> None:
    env = {**os.environ, "MOONCACHE_GATEWAY_NO_SUCH_SETTING": "1"}
    with subprocess.Popen(["/bin/sleep", "60"], env=env) as process:
        try:
            # A process that has just begun shows no environment for a moment.
            wait_until(Path(f"/proc/{process.pid}/environ").read_bytes, "its environment is there")
            assert "MOONCACHE_GATEWAY_NO_SUCH_SETTING" in settings_problem(process.pid)
        finally:
            process.kill()


def test_the_interpreter_of_the_next_start(tmp_path: Path) -> None:
    assert interpreter_of(tmp_path) == sys.executable
    choose_interpreter(tmp_path, "/bin/sh")
    assert interpreter_of(tmp_path) == "/bin/sh"
    (tmp_path / INTERPRETER_FILE).chmod(0o666)
    assert interpreter_of(tmp_path) == sys.executable, "others could have written it"
    (tmp_path / INTERPRETER_FILE).chmod(0o600)
    forget_interpreter(tmp_path)
    forget_interpreter(tmp_path)
    assert interpreter_of(tmp_path) == sys.executable
    for bad in ("sh", str(tmp_path), str(tmp_path / "gone")):
        with pytest.raises(ConfigInvalid, match=re.escape(bad)):
            choose_interpreter(tmp_path, bad)
    (tmp_path / INTERPRETER_FILE).write_text(str(tmp_path / "gone"))
    assert interpreter_of(tmp_path) == sys.executable, "it was removed meanwhile"
