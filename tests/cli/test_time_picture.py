"""The picture of one request's time: a row for each leg, every part in the legend, and the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.cli.time_picture import save_time_picture
from tests.cli.test_time_bars import REQUEST


@pytest.fixture(name="picture")
def _picture(tmp_path: Path) -> str:
    save_time_picture(REQUEST, "Request r-1", tmp_path / "time.svg")
    return (tmp_path / "time.svg").read_text()


def test_it_names_every_leg_and_every_part(picture: str) -> None:
    for text in ("prefill prefill-1", "decode decode-1", "decode decode-1 loads", "Request r-1"):
        assert f">{text}<" in picture.replace("&#45;", "-")
    for part in ("planning", "waiting for blocks", "loading blocks", "computing the prompt", "generating"):
        assert f">{part}<" in picture


def test_a_screen_reader_hears_the_spans(picture: str) -> None:
    assert "decode decode-1: loading blocks from 55 to 70 ms" in picture


def test_equal_requests_give_equal_bytes(picture: str, tmp_path: Path) -> None:
    save_time_picture(REQUEST, "Request r-1", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == picture
