"""What a person sees while a cluster starts: one line for each part, with what it does and for how long."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_TEXT_MAX = 80


class _Line:
    """One part: what it said last, since when it runs, and when it was ready."""

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.ended_s: float | None = None
        self.text = ""
        self.step = ""
        self.spinner = Spinner("dots", style="cyan")


class StartView:
    """Live lines on a terminal; elsewhere one line of text for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: dict[str, _Line] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=8, transient=False
            )
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, name: str, what: str) -> None:
        """Progress of the cluster: "started", "ready", or what the part is doing."""
        now_s = time.monotonic()
        line = self._lines.setdefault(name, _Line(now_s))
        step, _, _ = what.partition(": ")
        news, line.step = step != line.step, step
        if what == "ready":
            line.ended_s, line.text = now_s, ""
        elif what != "started":
            line.ended_s, line.text = None, what
        if self._live is None and news:
            self._say(name, line, what)

    def _say(self, name: str, line: _Line, what: str) -> None:
        if line.ended_s is not None:
            self._console.print(f"[green]✓[/] {name} [dim]{line.ended_s - line.began_s:.1f} s[/]")
        elif what != "started":
            self._console.print(f"  {name}: ", end="")
            self._console.print(line.step, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True, min_width=10)
        table.add_column(justify="right", no_wrap=True, min_width=7, style="dim")
        table.add_column(no_wrap=True, overflow="ellipsis", style="dim")
        now_s = time.monotonic()
        for name, line in list(self._lines.items()):
            mark = Text("✓", style="green") if line.ended_s is not None else line.spinner
            elapsed_s = (line.ended_s or now_s) - line.began_s
            table.add_row(mark, name, f"{elapsed_s:.1f} s", Text(line.text[:_TEXT_MAX]))
        return table
