"""Logs: one JSON object a line, stable codes, and never a token."""

from __future__ import annotations

import errno
import io
import json
import re
from collections.abc import Iterator

import pytest

from mooncache.runtime import logs
from mooncache.runtime.logs import Event, get_logger

TOKENS = ["mcc1." + "0a" * 32, "mct1.team-a." + "ff" * 32]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    out = io.StringIO()
    logs.setup("test", level="debug", log_format="json", stream=out)
    yield out
    logs.reset()


def test_lines_are_json_with_a_code(stream: io.StringIO) -> None:
    get_logger("x").info(Event.SERVICE_READY, grpc_target="127.0.0.1:1")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["service"]) == ("service.ready", "info", "test")
    assert "timestamp" in line


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_blotted_out_everywhere(stream: io.StringIO, token: str) -> None:
    secret = token.rsplit(".", 1)[1]
    log = get_logger("x")
    log.info(Event.RPC_DEFECT, error=f"bad {token}!", nested={"a": [f"Bearer {token}"]}, token=secret)
    log.info(
        Event.RPC_DEFECT,
        authorization=token,
        pairs=[("authorization", f"Bearer {token}")],
        raw=token.encode(),
    )
    try:
        raise ValueError(f"failed with {token}")
    except ValueError as error:
        log.error(Event.RPC_DEFECT, exc_info=error)
    text = stream.getvalue()
    assert secret not in text
    assert text.count("[redacted]") >= 4
    assert "ValueError" in text


def test_console_is_for_people_and_redacts_too() -> None:
    out = io.StringIO()
    logs.setup("test", log_format="console", stream=out)
    try:
        get_logger("x").info(Event.SERVICE_READY, note=TOKENS[0])
        get_logger("x").debug(Event.SERVICE_READY, note="below the level")
    finally:
        logs.reset()
    assert "service.ready" in out.getvalue()
    assert "0a0a" not in out.getvalue()
    assert "below" not in out.getvalue()


class FullDisk(io.StringIO):
    """A file on a file system that has no room for a while."""

    full = True

    def write(self, text: str, /) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_costs_lines_and_fails_nobody() -> None:
    disk = FullDisk()
    logs.setup("test", log_format="json", stream=disk)
    try:
        for _ in range(3):
            get_logger("x").error(Event.RPC_DEFECT)
        disk.full = False
        get_logger("x").info(Event.SERVICE_READY)
        get_logger("x").info(Event.SERVICE_STOPPED)
    finally:
        logs.reset()
    lines = [json.loads(line) for line in disk.getvalue().splitlines()]
    assert [(line["event"], line.get("lines_lost")) for line in lines] == [
        ("service.ready", 3),
        ("service.stopped", None),
    ]


def test_codes_are_well_formed_and_unique() -> None:
    codes = [event.value for event in Event]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+\.[a-z_]+", code) for code in codes)


def test_before_setup_only_warnings_reach_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("x").info(Event.SERVICE_READY)
    get_logger("x").warning(Event.DUTY_FAILED, note=TOKENS[1])
    out, err = capsys.readouterr()
    assert out == ""
    assert "duty.failed" in err
    assert "service.ready" not in err
    assert "ffff" not in err
