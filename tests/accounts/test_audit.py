"""The audit log: each act leaves one entry with its result, and what was changed afterwards is found."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts import audit_log, postgres
from mooncache.accounts.audit_log import AUDIT_FILE, append, first_break_of, lines
from mooncache.accounts.core.audit import (
    ENTRY_BYTES_MAX,
    AuditEntry,
    first_break,
    line_of,
    read_entry,
    trimmed,
)
from mooncache.accounts.database import AccountsPlace
from mooncache.cli.acts import ACTS, act_of, without_secrets
from mooncache.cli.app import build
from mooncache.cli.app import run as cli
from mooncache.errors import ConfigInvalid


def entry(number: int, **changes: Any) -> AuditEntry:
    fields: dict[str, Any] = {
        "unix_ms": number,
        "who": "ann@moon",
        "what": "drain",
        "arguments": ["n"],
        "result": "OK",
    }
    return AuditEntry(**(fields | changes))


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli(["audit", "--state-dir", str(folder), "--json", *options]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["entries"]
    return found


def test_acts_leave_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--state-dir", str(tmp_path)]
    assert cli(["key", "create", "--tenant", "moon", "--json", *where]) == 0
    made = json.loads(capsys.readouterr().out)
    assert cli(["key", "revoke", made["id"], *where]) == 0
    assert cli(["key", "revoke", "0" * 16, f"--state-dir={tmp_path}"]) == 1
    assert cli(["key", "ls", *where]) == 0
    assert cli(["key", "revoke", *where]) == 2  # no command
    assert cli(["tenant", "purge", "moon", *where]) == 2  # without --yes
    assert cli(
        ["tenant", "set", "moon", "--share", "1GiB", "--master", "127.0.0.1:1", "--timeout", "1s", *where]
    )
    found = shown(tmp_path, capsys)
    assert [(each["what"], each["result"]) for each in found[:4]] == [
        ("key create", "OK"),
        ("key revoke", "OK"),
        ("key revoke", "NOT_FOUND"),
        ("tenant purge", "INVALID_ARGUMENT"),
    ]
    assert found[4]["what"] == "tenant set" and found[4]["result"] != "OK"
    assert found[0]["details"] == {"key_id": made["id"], "tenant": "moon"}
    assert made["key"] not in json.dumps(found)
    assert all("@" in each["who"] for each in found)
    assert [each["what"] for each in shown(tmp_path, capsys, "--what", "tenant")] == [
        "tenant purge",
        "tenant set",
    ]
    assert len(shown(tmp_path, capsys, "--failed")) == 3
    assert len(shown(tmp_path, capsys, "--limit", "2")) == 2
    assert shown(tmp_path, capsys, "--until", "1h") == []
    assert len(shown(tmp_path, capsys, "--since", "1h")) == 5
    assert shown(tmp_path, capsys, "--who", "somebody-else") == []
    path = tmp_path / "accounts" / AUDIT_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cli(["audit", "--verify", *where]) == 0
    path.write_bytes(b"".join(line for n, line in enumerate(path.read_bytes().splitlines(True)) if n != 2))
    capsys.readouterr()
    assert cli(["audit", "--verify", *where]) == 1
    assert "line 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("act", "arguments"),
    [
        ("rm", ["a", "b"]),
        ("pin", ["a", "--ttl", "1min"]),
        ("unpin", ["a"]),
        ("batch cancel", ["batch_0"]),
    ],
)
def test_acts_on_blocks_and_batches_that_fail_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], act: str, arguments: list[str]
) -> None:
    assert cli([*act.split(), *arguments, "--state-dir", str(tmp_path)]) != 0, "no cluster is here"
    (found,) = shown(tmp_path, capsys)
    assert found["what"] == act and found["result"] not in ("OK", "FAILED")
    assert found["arguments"][: len(arguments)] == arguments


def test_the_code_of_an_invitation_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--code", "K7QM-SECRET"], ["--code=K7QM-SECRET"]):
        assert cli(["join", "127.0.0.1:1", *option, "--state-dir", str(tmp_path)]) == 2
    found = shown(tmp_path, capsys)
    assert [(each["what"], each["result"]) for each in found] == [("join", "INVALID_ARGUMENT")] * 2
    assert found[0]["arguments"][:3] == ["127.0.0.1:1", "--code", "[redacted]"]
    assert "K7QM" not in json.dumps(found)
    assert without_secrets(["a", "--code"]) == ["a", "--code"]


def test_an_act_is_done_where_it_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "accounts").mkdir(mode=0o700)
    (tmp_path / "accounts" / AUDIT_FILE).mkdir()
    assert cli(["key", "create", "--tenant", "moon", "--state-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("mca1.") and "not in the audit log" in said.err


def test_every_act_is_a_command_and_reading_is_none() -> None:
    app = build()
    for words in ACTS:
        at: App = app
        for word in words:
            at = at[word]
        assert act_of([*words, "x"]) == words
        assert act_of([*words, "--help"]) == ()
    for reading in (
        ["invite", "list"],
        ["tenant", "ls"],
        ["key", "ls"],
        ["status"],
        ["config", "explain"],
        [],
    ):
        assert act_of(reading) == ()


def test_writers_at_the_same_time(place: AccountsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "LOCK_S", 600.0)
    for limit in ("LOCK_S", "CALL_S"):
        monkeypatch.setattr(postgres, limit, 600.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: append(place, entry(number)), range(40)))
    found = list(lines(place))
    assert len(found) == 40
    assert first_break_of(place) is None
    assert first_break(found) is None
    for number in range(1, 40):
        without = found[:number] + found[number + 1 :]
        assert first_break(without) == (None if number == 39 else number + 1)
    changed = found[7].replace(b"ann", b"bob")
    assert first_break([*found[:7], changed, *found[8:]]) == 9


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "FILE_BYTES_MAX", 300)
    monkeypatch.setattr(audit_log, "FILES_MAX", 3)
    for number in range(12):
        append(tmp_path, entry(number))
    names = sorted(path.name for path in tmp_path.glob("audit.jsonl*"))
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    found = list(lines(tmp_path))
    numbers = [each.unix_ms for line in found if (each := read_entry(line)) is not None]
    assert numbers == list(range(12 - len(found), 12))
    assert first_break(found) is None, "also from file to file"


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    append(tmp_path, entry(1))
    path = tmp_path / AUDIT_FILE
    path.write_bytes(path.read_bytes() + b'{"unix_ms": 2, "wh')
    append(tmp_path, entry(3))
    assert [read_entry(line) is not None for line in lines(tmp_path)] == [True, False, True]
    path.chmod(0o640)
    with pytest.raises(ConfigInvalid, match="chmod 600"):
        append(tmp_path, entry(4))
    with pytest.raises(ConfigInvalid, match="chmod 600"):
        list(lines(tmp_path))


@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda text: text.encode()))
def test_any_line_is_an_entry_or_none(line: bytes) -> None:
    found = read_entry(line)
    assert found is None or isinstance(found.unix_ms, int)
    assert first_break([line]) in (None, 1)


@given(st.lists(st.text(max_size=400), max_size=50), st.dictionaries(st.text(), st.text(max_size=400)))
def test_any_entry_has_a_bounded_line(arguments: list[str], details: dict[str, str]) -> None:
    line = line_of(trimmed(entry(1, arguments=arguments, details=details)))
    assert b"\n" not in line
    assert len(line) <= ENTRY_BYTES_MAX
