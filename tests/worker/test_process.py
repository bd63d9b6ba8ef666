"""An engine's process and its log, which must not fill the disk however long the engine runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mooncache.runtime import log_files
from mooncache.runtime.log_files import trim
from mooncache.worker.process import EngineProcess

WRITER = """
import sys
while True:
    with open(sys.argv[1]) as words:
        print(words.readline().strip() * 100, flush=True)
"""


async def test_a_log_is_cut_while_the_engine_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(log_files, "LOG_KEPT_BYTES", 200)
    words, log = tmp_path / "words", tmp_path / "engine.log"
    os.mkfifo(words)
    engine = EngineProcess([sys.executable, "-c", WRITER, str(words)], os.environ, log)
    try:
        trim(log)
        assert log.exists() and not (tmp_path / "engine.log.1").exists()
        for word in ("one", "two", "three", "four", "five"):
            words.write_text(word + "\n")
            while word not in log.read_text():
                assert await engine.wait(0.01) is None
            trim(log)
            assert log.stat().st_size <= 1000
    finally:
        await engine.kill()
    aside = tmp_path / "engine.log.1"
    assert len(aside.read_bytes()) == 200 and b"five" not in aside.read_bytes()
    assert aside.stat().st_mode & 0o777 == 0o600
    trim(tmp_path / "none")  # nothing to do
