"""What the commands over traces share: options of a trace file, a bar on the terminal, missing packages in words.

Nothing heavy is imported before it is needed: `mooncache --help` has to stay quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from mooncache.errors import InvalidArgument, Unsupported
from mooncache.reporting.output import error_console

if TYPE_CHECKING:
    from mooncache.traces import Trace

BlockTokens = Annotated[
    int,
    Parameter(help="Tokens of a block of the trace; 0 takes 512, or what fits the file when 512 does not."),
]
TimeUnit = Annotated[
    Literal["", "ms", "s"], Parameter(help="Unit of the trace's timestamps; the format has milliseconds.")
]


@Parameter(name="*")
@dataclass(frozen=True)
class TraceFormat:
    """How a trace file is to be read when it is not quite the public format."""

    block_tokens: BlockTokens = 0
    time_unit: TimeUnit = ""

    def read(self, path: Path, option: str = "--trace") -> Trace:
        """The trace of a command line.

        Raises:
            InvalidArgument: the file cannot be opened. Unsupported: NumPy is not installed.
            TraceInvalid, TraceTooLarge: what is wrong, with its line.
        """
        need_packages("numpy")
        from mooncache.traces import read

        if self.block_tokens < 0:
            raise InvalidArgument(
                f"--block-tokens: {self.block_tokens} tokens; at least 1, or 0 to detect it."
            )
        try:
            return read(path, block_tokens=self.block_tokens or None, time_unit=self.time_unit)
        except OSError as error:
            raise InvalidArgument(f"{option}: {path} cannot be read: {error.strerror}.") from None


PUBLIC_FORMAT = TraceFormat()
"""Milliseconds, blocks of 512 tokens or what fits."""


def need_packages(*modules: str) -> None:
    """Raises Unsupported, naming what is missing and what brings it."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise Unsupported(
            f"This command needs {' and '.join(missing)}, which "
            f'{"is" if len(missing) == 1 else "are"} not installed: pip install "mooncache[simulate]".'
        )


@contextmanager
def progress(unit: str = "", *, quiet: bool) -> Iterator[Callable[[str, float, float], None]]:
    """A bar on a terminal's error stream, silence elsewhere: tell(what is being done, how much is done, of how much).

    With a unit the numbers are shown ("3/12 requests"), without one a percentage; total 0: not known yet.
    """
    if quiet or not error_console.is_terminal:
        yield lambda _what, _done, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown = (MofNCompleteColumn(), TextColumn(unit)) if unit else (TextColumn("{task.percentage:>3.0f} %"),)
    columns = (TextColumn("{task.description:<22}"), BarColumn(), *shown, TimeElapsedColumn())
    with Progress(*columns, console=error_console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: float, total: float) -> None:
            bar.update(
                task, description=what, total=total or None, completed=min(done, total) if total else 0
            )

        yield tell
