"""How the CLI speaks: rich text for people, one JSON document for programs; errors as a sentence and an exit code.

Exit codes are stable: 0 done, 1 a miss or a part failed, 2 wrong arguments or configuration, 3 a part cannot be
reached (trying again may help), 4 not allowed, 5 no space, 70 a defect, 130 interrupted.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mooncache.errors import InvalidArgument, MooncacheError

EXIT_OK = 0
EXIT_MISS = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_DENIED = 4
EXIT_CAPACITY = 5
EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130

# Keys, fingerprints and addresses have parts such as ":ab:", which are also names of pictures.
console = Console(highlight=False, emoji=False)
error_console = Console(stderr=True, highlight=False, emoji=False)


def exit_code_of(code: int) -> int:
    """The exit code that belongs to a stable error code."""
    if code in {900, 202}:
        return EXIT_DEFECT
    by_group = {1: EXIT_USAGE, 2: EXIT_MISS, 3: EXIT_CAPACITY, 4: EXIT_UNAVAILABLE, 5: EXIT_DENIED}
    if code == 901:
        return EXIT_USAGE
    return by_group.get(code // 100, EXIT_MISS)


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, default=_plain) + "\n")


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Comma-separated values on stdout, with a line of names."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people. Columns whose name ends in a number's unit are right-aligned; an id stays on one line."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        numeric = column.endswith(("*", "size", "blocks", "used", "free", "pins", "hits", "age"))
        table.add_column(
            column.rstrip("*"),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=column == "id",  # so that it can be copied
        )
    for row in rows:
        table.add_row(*[escape(str(cell)) for cell in row])
    console.print(table)


def report_error(error: MooncacheError, *, as_json: bool) -> int:
    """Show an error and return the exit code that belongs to it."""
    hint = "" if error.hint == error.message else error.hint
    if as_json:
        print_json(
            {
                "error": {
                    "code": error.code,
                    "name": error.name,
                    "message": error.message,
                    "retryable": error.retryable,
                    "hint": error.hint,
                }
            }
        )
    else:
        error_console.print(f"[bold red]{error.name}[/] ({error.code}): ", end="")
        error_console.print(error.message, markup=False, soft_wrap=True)
        if hint:
            error_console.print(hint, markup=False, style="dim", soft_wrap=True)
    return exit_code_of(error.code)


def human_bytes(size: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def human_age(seconds: float) -> str:
    """93.4 -> 1m33s."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def check_writable(path: Path | None, option: str) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold.

    Raises: InvalidArgument, naming option, path and reason.
    """
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise InvalidArgument(f"{option}: {path} cannot be written: Is a directory.")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{option}: {path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidArgument(f"{option}: {path} cannot be written: Permission denied.")
