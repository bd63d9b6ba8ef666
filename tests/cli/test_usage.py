"""`mooncache usage`: what it prints for people, programs and spreadsheets."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.accounts.core.usage import HOUR_S, UsageCounts, UsageKey, UsagePart, WorkClass
from mooncache.accounts.usage_store import UsageStore
from mooncache.cli.app import run as cli

JANUARY = 1_798_761_600  # 2027-01-01
ROWS = {
    UsageKey(JANUARY, "moon", "token", "m", WorkClass.ONLINE): UsageCounts(
        3, 1, 1, 2_000_000, 500_000, 90, 40
    ),
    UsageKey(JANUARY + HOUR_S, "moon", "0123456789abcdef", "m", WorkClass.OFFLINE): UsageCounts(
        1, 0, 0, 10, 0, 5
    ),
    UsageKey(JANUARY + HOUR_S, "star", "token", 'n,"1"', WorkClass.ONLINE): UsageCounts(1, 0, 0, 7, 7, 1),
    UsageKey(JANUARY + 31 * 86_400, "moon", "token", "m", WorkClass.ONLINE): UsageCounts(1, 0, 0, 1, 0, 1),
}
SPAN = ("--since", "2027-01-01", "--until", "2027-02-01")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with UsageStore(tmp_path / "accounts", create=True) as store:
        store.add("w", UsagePart(1, ROWS), JANUARY)
    return tmp_path


def said(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    assert cli(["usage", "--state-dir", str(folder), *SPAN, *options]) == 0
    return capsys.readouterr().out


def test_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(said(folder, capsys, "--json"))
    assert (document["since_unix_s"], document["until_unix_s"]) == (JANUARY, JANUARY + 31 * 86_400)
    found: dict[str, Any] = {each["tenant"]: each for each in document["usage"]}
    assert (found["moon"]["requests"], found["moon"]["input_tokens"]) == (4, 2_000_010)
    assert (found["moon"]["failed"], found["moon"]["cancelled"], found["moon"]["estimated_tokens"]) == (
        1,
        1,
        40,
    )
    assert found["star"]["cached_tokens"] == 7
    mine = json.loads(said(folder, capsys, "--json", "--tenant", "moon", "--by", "key", "--by", "class"))
    assert [(each["key_id"], each["work_class"]) for each in mine["usage"]] == [
        ("0123456789abcdef", "offline"),
        ("token", "online"),
    ]


def test_for_spreadsheets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(said(folder, capsys, "--csv", "--by", "hour", "--by", "model"))))
    assert [(row["hour"], row["model"], row["requests"]) for row in rows] == [
        ("2027-01-01T00:00Z", "m", "3"),
        ("2027-01-01T01:00Z", "m", "1"),
        ("2027-01-01T01:00Z", 'n,"1"', "1"),
    ]
    assert sum(int(row["input_tokens"]) for row in rows) == 2_000_017


def test_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(folder, capsys)
    assert "2,000,010" in text and "star" in text
    assert "40 of 2,000,113 tokens are estimates" in text


PRICES = """
[cost]
currency = "EUR"
[[cost.tokens]]
models = "m"
work_class = "offline"
input_per_million = 1
output_per_million = 0
[[cost.tokens]]
models = "[lm]"
input_per_million = 2.0
cached_per_million = 0.5
output_per_million = 10.0
"""


def test_money(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prices of tokens by model and class; what has none is named and in no sum."""
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    document = json.loads(said(folder, capsys, "--json", "--prices", str(path)))
    assert document["currency"] == "EUR"
    found: dict[str, Any] = {each["tenant"]: each for each in document["usage"]}
    moon, star = found["moon"], found["star"]
    assert moon["input"] == pytest.approx(1.5 * 2 + 10e-6)
    assert moon["cached"] == pytest.approx(0.25) and moon["output"] == pytest.approx(90 * 10e-6)
    assert moon["saved"] == pytest.approx(0.5 * 2 - 0.25) and moon["unpriced_tokens"] == 0
    assert moon["total"] == pytest.approx(moon["input"] + moon["cached"] + moon["output"])
    assert (star["total"], star["unpriced_tokens"]) == (0, 8)
    text = said(folder, capsys, "--prices", str(path))
    assert "EUR" in text and "8 of 2,000,113 tokens have no price" in text
    row = next(csv.DictReader(io.StringIO(said(folder, capsys, "--csv", "--prices", str(path)))))
    assert float(row["total"]) == pytest.approx(moon["total"])
    assert "total" not in said(folder, capsys, "--csv"), "money without a price book"


@pytest.mark.parametrize("value", ["-1", "nan", '"1"', "1e9"])
def test_prices_that_are_none(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(f"[[cost.tokens]]\noutput_per_million = {value}\n")
    assert cli(["usage", "--state-dir", str(folder), "--prices", str(path)]) == 1
    assert "cost.tokens[1].output_per_million" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--csv", "--json"], "exclude each other"),
        (["--since", "2027-02-01", "--until", "2027-01-01"], "before --until"),
        (["--since", "yesterday"], "--since"),
        (["--by", "colour"], "colour"),
    ],
)
def test_wrong_options(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    capsys.readouterr()
    assert cli(["usage", "--state-dir", str(folder), *options]) == 2
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


def test_nothing_was_metered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["usage", "--state-dir", str(tmp_path)]) == 1
    assert "gateway.usage_enabled" in capsys.readouterr().err
