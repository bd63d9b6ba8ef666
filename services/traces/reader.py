"""Reads a trace in the public JSONL format, and says exactly what is wrong with one that is not.

Lines are decoded by msgspec against a schema, block ids go straight into flat arrays, and what can be asked of all
rows at once (order of times, number of blocks, one parent for each id) is asked of the arrays. Memory is bounded by
limits on the length of a line and on all blocks, whatever the file claims. Nothing but TraceInvalid, TraceTooLarge
and OSError leaves `read`.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from mooncache.errors import TraceInvalid, TraceTooLarge
from mooncache.traces.checks import check_blocks, check_parents, check_times
from mooncache.traces.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Kind = TypeVar("_Kind", np.int32, np.int8)

LINE_BYTES_MAX = 8 << 20
REQUESTS_MAX = 50_000_000
BLOCKS_MAX = 400_000_000
TOKENS_MAX = 1 << 30
_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_ID_MAX = (1 << 63) - 1
_SHOWN_CHARS = 60
_OPTIONAL: dict[str, type[np.int32 | np.int8]] = {
    "tenant": np.int32,
    "session": np.int32,
    "priority": np.int8,
}


class _Row(msgspec.Struct):
    """One line. Other fields may be there and are passed over."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    tenant: int | None = None
    session: int | None = None
    priority: int | None = None


_DECODER = msgspec.json.Decoder(_Row)


class _Columns:
    """What has been read so far, in flat arrays."""

    def __init__(self) -> None:
        self.timestamp = array("d")
        self.inputs = array("q")
        self.outputs = array("q")
        self.counts = array("q")
        self.ids = array("q")
        self.lines = array("q")
        self.optional: dict[str, array[int] | None] = {name: array("q") for name in _OPTIONAL}


def read(
    path: str | os.PathLike[str],
    *,
    block_tokens: int | None = None,
    time_unit: str = "",
    requests_max: int = REQUESTS_MAX,
) -> Trace:
    """The trace in a file of the public JSONL format, plain or gzipped. Times stay as they are stamped.

    `block_tokens` None: 512, or what fits the file when 512 does not. `time_unit` says what a timestamp is ("ms" as
    in the format, "s"); "" is ms, refused when conversations would then go on faster than anyone can read.
    TraceInvalid names line, field and value of the first thing that is wrong; OSError when the file cannot be read.
    """
    if time_unit not in {"", "ms", "s"}:
        raise TraceInvalid(f"time_unit is ms or s, not {time_unit!r}")
    file = Path(path)
    columns = _Columns()
    for number, line, is_cut in _lines(file):
        if len(columns.lines) >= requests_max:
            raise TraceTooLarge(f"{file.name}: more than {requests_max:,} requests; cut the file into parts")
        _take(columns, file.name, number, line, is_cut=is_cut)
    if not columns.lines:
        raise TraceInvalid(f"{file.name}: no request in the file; a trace has one JSON object on each line")
    return _finish(columns, file.name, block_tokens, time_unit)


def _lines(file: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line, whether the file ends in the middle of it) of all lines that are not blank."""
    with file.open("rb") as raw:
        is_zipped = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        source: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_zipped else raw
        number, rest = 0, b""
        while True:
            try:
                chunk = source.read(_CHUNK_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise TraceInvalid(
                    f"{file.name}, after line {number}: the compressed file is cut off or damaged ({error}); "
                    "copy it again"
                ) from None
            if not chunk:
                break
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    yield number, line, False
            if len(rest) > LINE_BYTES_MAX:
                raise TraceTooLarge(
                    f"{file.name}, line {number + 1}: longer than {LINE_BYTES_MAX >> 20} MiB; one request is one line"
                )
        if rest.strip():
            yield number + 1, rest, True


def _take(columns: _Columns, name: str, number: int, line: bytes, *, is_cut: bool) -> None:
    """Decode one line into the columns."""
    where = f"{name}, line {number}"
    try:
        row = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceInvalid(_undecodable(where, line, error, is_cut=is_cut)) from None
    if not 0 <= row.timestamp < math.inf:
        raise TraceInvalid(f"{where}: timestamp is {row.timestamp:g}, it has to be 0 or more (milliseconds)")
    if not 1 <= row.input_length <= TOKENS_MAX:
        raise TraceInvalid(
            f"{where}: input_length is {row.input_length}, it has to be 1 to {TOKENS_MAX:,} tokens"
        )
    if not 0 <= row.output_length <= TOKENS_MAX:
        raise TraceInvalid(
            f"{where}: output_length is {row.output_length}, it has to be 0 to {TOKENS_MAX:,} tokens"
        )
    ids = row.hash_ids
    columns.timestamp.append(row.timestamp)
    columns.inputs.append(row.input_length)
    columns.outputs.append(row.output_length)
    columns.counts.append(len(ids))
    try:
        columns.ids.extend(ids)
    except OverflowError:
        raise _wrong_id(where, ids) from None
    columns.lines.append(number)
    if len(columns.ids) > BLOCKS_MAX:
        raise TraceTooLarge(f"{where}: more than {BLOCKS_MAX:,} blocks so far; cut the file into parts")
    for field, kind in _OPTIONAL.items():
        values = columns.optional[field]
        if values is None:
            continue
        value = getattr(row, field)
        if value is None:
            columns.optional[field] = None
            continue
        limits = np.iinfo(kind)
        if not limits.min <= value <= limits.max:
            raise TraceInvalid(f"{where}: {field} is {value}, it has to be {limits.min} to {limits.max}")
        values.append(value)


def _wrong_id(where: str, ids: list[int]) -> TraceInvalid:
    wrong = next(each for each in ids if not 0 <= each <= _ID_MAX)
    return TraceInvalid(f"{where}: hash_ids has {wrong}, an id is a number from 0 to 2^63 - 1")


def _undecodable(where: str, line: bytes, error: Exception, *, is_cut: bool) -> str:
    """What is wrong with a line that is not a request, in words."""
    reason = str(error)
    shown = line[:_SHOWN_CHARS].decode("utf-8", "replace") + ("..." if len(line) > _SHOWN_CHARS else "")
    if isinstance(error, msgspec.ValidationError):
        return f"{where}: {reason}; the line is {shown}"
    if is_cut:
        return f"{where}: the last line is cut off: {shown}; remove it or copy the file again"
    for word in (b"NaN", b"Infinity", b"nan", b"inf"):
        if word in line:
            return f"{where}: {word.decode()} is not a number that JSON knows: {shown}"
    return f"{where}: {reason}; the line is {shown}"


def _finish(columns: _Columns, name: str, block_tokens: int | None, time_unit: str) -> Trace:
    lines = np.frombuffer(columns.lines, np.int64)
    counts = np.frombuffer(columns.counts, np.int64)
    inputs = np.frombuffer(columns.inputs, np.int64)
    ids = np.frombuffer(columns.ids, np.int64) if columns.ids else np.zeros(0, np.int64)
    offsets = np.r_[0, np.cumsum(counts)]
    if len(ids) and int(ids.min()) < 0:
        row = int(np.searchsorted(offsets, int(np.argmax(ids < 0)), side="right")) - 1
        raise _wrong_id(f"{name}, line {lines[row]}", ids[offsets[row] : offsets[row + 1]].tolist())
    size = check_blocks(name, lines, inputs, counts, block_tokens)
    check_parents(name, lines, ids, offsets)
    arrival_s = check_times(
        name, lines, np.frombuffer(columns.timestamp, np.float64), ids, offsets, time_unit
    )
    return Trace(
        arrival_s=arrival_s,
        input_tokens=inputs.astype(np.int32),
        output_tokens=np.frombuffer(columns.outputs, np.int64).astype(np.int32),
        offsets=offsets,
        hash_ids=ids.copy(),
        block_tokens=size,
        tenant=_optional(columns, "tenant", np.int32),
        session=_optional(columns, "session", np.int32),
        priority=_optional(columns, "priority", np.int8),
    )


def _optional(columns: _Columns, field: str, kind: type[_Kind]) -> NDArray[_Kind] | None:
    """A column that every row had, else None."""
    values = columns.optional[field]
    return None if values is None else np.frombuffer(values, np.int64).astype(kind)
