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

from mooncache.cluster.supervisor import PartNews, PartStage

_TEXT_MAX = 80


class _Line:
    """One part: its last news, since when it runs, and when it was ready."""

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.ended_s: float | None = None
        self.news = PartNews(PartStage.STARTED, "")
        self.spinner = Spinner("dots", style="cyan")

    @property
    def text(self) -> str:
        """What the part is doing; "" when it has just started or is ready."""
        if self.news.stage != PartStage.BUSY:
            return ""
        return f"{self.news.text}: {self.news.detail}" if self.news.detail else self.news.text


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

    def tell(self, name: str, news: PartNews) -> None:
        """Show news of a part. Without a terminal, a new detail alone prints no line."""
        now_s = time.monotonic()
        line = self._lines.setdefault(name, _Line(now_s))
        changed = (news.stage, news.text) != (line.news.stage, line.news.text)
        line.news = news
        line.ended_s = now_s if news.stage == PartStage.READY else None
        if self._live is None and changed:
            self._say(name, line)

    def _say(self, name: str, line: _Line) -> None:
        if line.ended_s is not None:
            self._console.print(f"[green]✓[/] {name} [dim]{line.ended_s - line.began_s:.1f} s[/]")
        elif line.news.stage == PartStage.BUSY:
            self._console.print(f"  {name}: ", end="")
            self._console.print(line.news.text, markup=False, soft_wrap=True)

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
