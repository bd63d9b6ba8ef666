"""Writes a trace in the public JSONL format: one object for each request, times in milliseconds."""

from __future__ import annotations

import gzip
import os
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from mooncache.traces.trace import Trace

_LINES_AT_ONCE = 2_000


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace to `path`, compressed when that ends in `.gz`.

    The file is there whole or not at all. OSError when it cannot be written.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    opener = gzip.open if target.suffix == ".gz" else open
    try:
        with opener(unfinished, "wb") as file:
            _write_lines(trace, file)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_lines(trace: Trace, file: IO[bytes] | gzip.GzipFile) -> None:
    encode = msgspec.json.Encoder().encode
    optional = [(n, c) for n in ("tenant", "session", "priority") if (c := getattr(trace, n)) is not None]
    for begin in range(0, len(trace), _LINES_AT_ONCE):
        end = min(begin + _LINES_AT_ONCE, len(trace))
        times = trace.arrival_s[begin:end].tolist()
        inputs, outputs = trace.input_tokens[begin:end].tolist(), trace.output_tokens[begin:end].tolist()
        more = [(name, column[begin:end].tolist()) for name, column in optional]
        lines = []
        for row in range(end - begin):
            line: dict[str, object] = {
                "timestamp": milliseconds(times[row]),
                "input_length": inputs[row],
                "output_length": outputs[row],
                "hash_ids": trace.blocks(begin + row),
            }
            line.update((name, column[row]) for name, column in more)
            lines.append(encode(line))
        file.write(b"\n".join(lines) + b"\n")


def milliseconds(at_s: float) -> int | float:
    """Seconds as the format has them: whole milliseconds as an integer, else to the microsecond."""
    value = round(at_s * 1000, 3)
    return int(value) if value == int(value) else value
