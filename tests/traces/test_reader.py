"""What the reader takes, and what it says about everything else."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.errors import TraceInvalid, TraceTooLarge
from mooncache.traces import Trace, read, reader, write
from mooncache.traces.stats import stats

FIRST = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
SECOND = {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}


def file_of(tmp_path: Path, *rows: dict[str, Any] | str) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_reads_columns_and_optional_ones_that_every_row_has(tmp_path: Path) -> None:
    path = file_of(
        tmp_path, FIRST | {"tenant": 4, "session": 1}, SECOND | {"tenant": 2, "extra": {"a": 1}}, ""
    )
    trace = read(path)
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert trace.input_tokens.tolist() == [1000, 1030]
    assert trace.blocks(1) == [0, 1, 2]
    assert trace.block_tokens == 512
    assert trace.tenant is not None
    assert trace.tenant.tolist() == [4, 2]
    assert trace.session is None


WRONG: list[tuple[str, list[dict[str, Any] | str], list[str]]] = [
    ("no json", [FIRST, "hello"], ["line 2", "hello"]),
    ("not an object", [FIRST, "[1]"], ["line 2", "object"]),
    ("text for a number", [FIRST | {"input_length": "1000"}], ["line 1", "input_length", "str"]),
    ("fraction for a count", [FIRST | {"output_length": 1.5}], ["line 1", "output_length", "float"]),
    ("missing field", [{"timestamp": 0, "input_length": 1, "hash_ids": [0]}], ["line 1", "output_length"]),
    ("wrong id", [FIRST | {"hash_ids": [0, "x"]}], ["line 1", "hash_ids"]),
    ("negative id", [FIRST | {"hash_ids": [0, -3]}], ["line 1", "hash_ids", "-3"]),
    ("huge id", [FIRST | {"hash_ids": [0, 1 << 70]}], ["line 1", "hash_ids", str(1 << 70)]),
    (
        "NaN",
        ['{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [0]}'],
        ["line 1", "NaN"],
    ),
    ("infinite", [json.dumps(FIRST).replace(": 0,", ": 1e999,")], ["line 1"]),
    ("negative time", [FIRST | {"timestamp": -1}], ["line 1", "timestamp", "-1"]),
    ("negative length", [FIRST | {"input_length": -5}], ["line 1", "input_length", "-5"]),
    ("empty prompt", [FIRST | {"input_length": 0, "hash_ids": []}], ["line 1", "input_length"]),
    ("huge length", [FIRST | {"input_length": 1 << 40}], ["line 1", "input_length"]),
    ("time goes back", [FIRST | {"timestamp": 9}, SECOND | {"timestamp": 8}], ["line 2", "timestamp 8", "9"]),
    (
        "too few blocks",
        [FIRST, SECOND, SECOND | {"hash_ids": [0, 1]}],
        ["line 3", "hash_ids", "2 ids", "3 blocks"],
    ),
    (
        "two parents",
        [FIRST, SECOND | {"hash_ids": [0, 2, 1]}],
        ["line 2", "hash_ids[2]", "1 behind 2", "line 1"],
    ),
    ("root within", [FIRST, SECOND | {"hash_ids": [1, 0, 2]}], ["line 2", "hash_ids[0]", "nothing"]),
    ("an id twice", [FIRST | {"hash_ids": [7, 7]}], ["line 1", "hash_ids"]),
    ("tenant of text", [FIRST | {"tenant": "me"}], ["line 1", "tenant"]),
    ("priority too large", [FIRST | {"priority": 1000}], ["line 1", "priority", "1000"]),
]


@pytest.mark.parametrize(
    ("rows", "words"), [pytest.param(rows, words, id=name) for name, rows, words in WRONG]
)
def test_says_line_field_and_value(
    tmp_path: Path, rows: list[dict[str, Any] | str], words: list[str]
) -> None:
    with pytest.raises(TraceInvalid) as caught:
        read(file_of(tmp_path, *rows))
    for word in words:
        assert word in caught.value.message


def test_an_empty_file_and_blank_lines_are_no_trace(tmp_path: Path) -> None:
    for content in ("", "\n\n  \n"):
        path = tmp_path / "empty.jsonl"
        path.write_text(content)
        with pytest.raises(TraceInvalid, match="no request"):
            read(path)


def test_a_file_cut_off_anywhere_is_read_or_refused_with_its_line(tmp_path: Path) -> None:
    whole = file_of(tmp_path, FIRST, SECOND).read_bytes()
    path = tmp_path / "cut.jsonl"
    first_line = whole.index(b"\n")
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        if size in (first_line, first_line + 1, len(whole) - 1):
            assert len(read(path)) in (1, 2)
            continue
        with pytest.raises(
            TraceInvalid, match=f"line {1 if size < first_line else 2}: the last line is cut off"
        ):
            read(path)


def test_gzip_is_read_whatever_its_name_and_refused_when_damaged(tmp_path: Path) -> None:
    packed = gzip.compress(file_of(tmp_path, FIRST, SECOND).read_bytes())
    path = tmp_path / "packed"
    path.write_bytes(packed)
    assert len(read(path)) == 2
    for damaged in (packed[:-6], packed[:20], packed[:15] + b"\0\0\0\0" + packed[19:]):
        path.write_bytes(damaged)
        with pytest.raises(TraceInvalid):
            read(path)


def test_a_gigantic_line_and_too_many_rows_end_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"timestamp": 0, "hash_ids": [')
        file.write(b"1," * (reader.LINE_BYTES_MAX // 2 + (1 << 20)))
    with pytest.raises(TraceTooLarge, match="line 1"):
        read(path)
    with pytest.raises(TraceTooLarge, match="more than 1 requests"):
        read(file_of(tmp_path, FIRST, SECOND), requests_max=1)
    monkeypatch.setattr(reader, "BLOCKS_MAX", 4)
    with pytest.raises(TraceTooLarge, match="line 2"):
        read(file_of(tmp_path, FIRST, SECOND))


def conversations(pause: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(30):
        ids = [2 * number, 2 * number + 1]
        rows.append(
            {"timestamp": number * pause * 2, "input_length": 1024, "output_length": 9, "hash_ids": ids}
        )
        rows.append({**rows[-1], "timestamp": number * pause * 2 + pause})
    return rows


def test_seconds_for_milliseconds_are_noticed(tmp_path: Path) -> None:
    path = file_of(tmp_path, *conversations(60))
    with pytest.raises(TraceInvalid, match=r"timestamp looks like seconds.*--time-unit"):
        read(path)
    assert read(path, time_unit="s").span_s == 60 * 59
    assert read(path, time_unit="ms").span_s == pytest.approx(0.06 * 59)
    assert read(file_of(tmp_path, *conversations(60_000))).span_s == 60 * 59


def test_stamps_of_a_calendar_count_from_the_first(tmp_path: Path) -> None:
    base = 1_700_000_000_000
    rows = [row | {"timestamp": base + row["timestamp"]} for row in (FIRST, SECOND)]
    assert read(file_of(tmp_path, *rows)).arrival_s.tolist() == [0.0, 3.0]


def test_the_size_of_a_block_is_found_or_given(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": at,
            "input_length": 16 * at + 5,
            "output_length": 1,
            "hash_ids": list(range(100 * at, 101 * at + 1)),
        }
        for at in range(1, 9)
    ]
    assert read(file_of(tmp_path, *rows)).block_tokens == 16
    with pytest.raises(TraceInvalid, match="blocks of 512 tokens"):
        read(file_of(tmp_path, *rows), block_tokens=512)
    with pytest.raises(TraceInvalid, match="block_tokens"):
        read(file_of(tmp_path, *rows), block_tokens=-1)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Requests that begin with a part of an earlier one, at ascending times."""
    block = draw(st.sampled_from([1, 16, 512]))
    chains: list[list[int]] = []
    inputs, next_id = [], 0
    for _ in range(draw(st.integers(1, 12))):
        source = draw(st.sampled_from(chains)) if chains and draw(st.booleans()) else []
        kept = source[: draw(st.integers(0, len(source)))]
        fresh = draw(st.integers(0 if kept else 1, 5))
        chains.append(kept + list(range(next_id, next_id + fresh)))
        next_id += fresh
        inputs.append(len(chains[-1]) * block - draw(st.integers(0, block - 1)))
    times = sorted(draw(st.lists(st.integers(0, 10**8), min_size=len(chains), max_size=len(chains))))
    counts = [len(chain) for chain in chains]
    has_tenant = draw(st.booleans())
    return Trace(
        arrival_s=np.array(times, float) / 1000,
        input_tokens=np.array(inputs, np.int32),
        output_tokens=np.array(
            draw(st.lists(st.integers(0, 99), min_size=len(chains), max_size=len(chains))), np.int32
        ),
        offsets=np.r_[0, np.cumsum(counts)].astype(np.int64),
        hash_ids=np.array([each for chain in chains for each in chain], np.int64),
        block_tokens=block,
        tenant=np.arange(len(chains), dtype=np.int32) if has_tenant else None,
    )


@settings(max_examples=150, deadline=None)
@given(trace=traces(), zipped=st.booleans())
def test_what_is_written_is_read(
    trace: Trace, zipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("round") / ("trace.jsonl.gz" if zipped else "trace.jsonl")
    write(trace, path)
    again = read(path, block_tokens=trace.block_tokens, time_unit="ms")
    for column in ("arrival_s", "input_tokens", "output_tokens", "offsets", "hash_ids"):
        assert np.array_equal(getattr(again, column), getattr(trace, column)), column
    assert (again.tenant is None) == (trace.tenant is None)
    assert list(path.parent.iterdir()) == [path]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
rows_of_anything = st.lists(
    st.fixed_dictionaries({}, optional=dict.fromkeys((*FIRST, "tenant", "priority"), json_values)).map(
        json.dumps
    )
    | st.text(max_size=30),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(rows=rows_of_anything)
def test_anything_else_is_a_trace_or_refused_as_one(
    rows: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.jsonl"
    path.write_bytes("\n".join(rows).encode("utf-8", "surrogatepass"))
    try:
        trace = read(path)
    except (TraceInvalid, TraceTooLarge):
        return
    assert len(trace) > 0


@settings(max_examples=200, deadline=None)
@given(noise=st.binary(max_size=200), place=st.integers(0, 400), zipped=st.booleans())
def test_bytes_put_anywhere_never_crash_the_reader(
    noise: bytes, place: int, zipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("noise")
    whole = file_of(folder, FIRST, SECOND, SECOND).read_bytes()
    whole = gzip.compress(whole) if zipped else whole
    path = folder / "noisy"
    path.write_bytes(whole[:place] + noise + whole[place + len(noise) // 2 :])
    with contextlib.suppress(TraceInvalid, TraceTooLarge):
        read(path)


def public_trace() -> Path:
    beside = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
    path = Path(os.environ.get("MOONCACHE_TRACE") or beside)
    if not path.is_file():
        pytest.skip("the public trace is not here (MOONCACHE_TRACE)")
    return path


def test_the_public_trace_has_its_published_figures() -> None:
    figures = stats(read(public_trace()))
    assert figures.requests == 12_031
    assert (figures.block_references, figures.blocks_unique) == (288_500, 182_790)
    assert round(figures.hit_ratio_blocks, 4) == 0.3664
    assert round(figures.hit_ratio_tokens, 3) == 0.374
    assert round(figures.used_once_share, 3) == 0.758
    assert figures.requests_at_once_max == 28
    assert (figures.input_quantiles["p50"], figures.input_quantiles["max"]) == (6_909, 126_195)
