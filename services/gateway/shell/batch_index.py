"""Where the requests of a batch's file are, in the order in which they are sent; small enough to be kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from mooncache.gateway.core.batch import BatchFault, OfflineBatch
from mooncache.gateway.core.batch_lines import (
    BLANK,
    BadLine,
    BatchLine,
    named_twice,
    prompt_order,
    read_line,
)
from mooncache.gateway.shell.batch_store import BatchStore


class Placed(NamedTuple):
    """A line: its number, where it begins and its bytes."""

    number: int
    begin: int
    size: int


class BatchIndex(NamedTuple):
    """All requests of a file in their order, and the lines that are none. fault: why there is nothing to do."""

    order: list[Placed]
    bad: list[BadLine]
    fault: BatchFault | None = None


def index_of(store: BatchStore, batch: OfflineBatch, count_max: int) -> BatchIndex:
    """Look through the batch's file. Blocks; raises OSError."""
    begins, sizes, numbers = array("Q"), array("Q"), array("Q")
    keys: list[bytes] = []
    names: set[str] = set()
    bad: list[BadLine] = []
    for number, (begin, data) in enumerate(_lines(store, batch.input_file_id), 1):
        line = data.strip(BLANK)
        if not line:
            continue
        found = read_line(line, number, batch.endpoint)
        if isinstance(found, BatchLine) and found.custom_id in names:
            found = named_twice(found)
        if len(keys) + len(bad) >= count_max:
            text = f"The file has more than {count_max} requests, which is the limit of a batch."
            return BatchIndex([], bad, BatchFault("too_many_requests", text))
        if isinstance(found, BadLine):
            bad.append(found)
            continue
        names.add(found.custom_id)
        keys.append(found.prompt_key)
        begins.append(begin)
        sizes.append(len(data))
        numbers.append(number)
    if not keys:
        return BatchIndex([], bad, BatchFault("empty_file", "No line of the file is a request."))
    order = [Placed(numbers[place], begins[place], sizes[place]) for place in prompt_order(keys)]
    return BatchIndex(order, bad)


def line_at(store: BatchStore, batch: OfflineBatch, placed: Placed) -> BatchLine:
    """One request of the index. Blocks; raises OSError when the file is gone or another one."""
    with store.pieces(batch.input_file_id) as opened:
        opened.seek(placed.begin)
        data = opened.read(placed.size)
    found = read_line(data.strip(BLANK), placed.number, batch.endpoint)
    if isinstance(found, BadLine):
        raise OSError(f"{batch.input_file_id} was changed")
    return found


def _lines(store: BatchStore, file_id: str) -> Iterator[tuple[int, bytes]]:
    """Each line with its place in the file."""
    at = 0
    for line in store.lines(file_id):
        yield at, line
        at += len(line)
