"""Files that are replaced whole: what a reader sees, modes, and what an error leaves."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mooncache.whole_file import AS_UMASK_SAYS, write_whole


def test_a_reader_sees_one_content_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "document"
    contents = [letter * 200_000 for letter in "ab"]
    write_whole(path, contents[0])
    ended = threading.Event()

    def write() -> None:
        for number in range(200):
            write_whole(path, contents[number % 2])
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        assert path.read_text() in contents
    writer.join()
    assert list(tmp_path.iterdir()) == [path]


def test_modes(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "secret", b"x", to_disk=True)
        write_whole(tmp_path / "open", "x", mode=AS_UMASK_SAYS)
        (tmp_path / "was open").write_text("old")
        (tmp_path / "was open").chmod(0o644)
        write_whole(tmp_path / "was open", "new")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"secret": 0o600, "open": 0o640, "was open": 0o600}


def test_after_an_error_nothing_lies_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "taken"
    place.mkdir()
    with pytest.raises(OSError):
        write_whole(place, "text")
    assert list(tmp_path.iterdir()) == [place]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no folder" / "file", "text")
