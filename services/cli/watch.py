"""After `mooncache up` has everything ready, in the foreground or behind it: watch the parts, say what happens."""

from __future__ import annotations

import signal
import time
from json import dumps
from types import FrameType
from typing import TYPE_CHECKING

from mooncache.cluster.supervisor import PartNews, PartStage
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, error_console

if TYPE_CHECKING:
    from mooncache.cluster.embedded import EmbeddedCluster

LOOK_S = 60.0  # everything is ready already; a busy machine must not end what has just begun


class Stop:
    """Remembers that the end was asked for."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:  # the second Ctrl-C does not wait
            raise KeyboardInterrupt
        self.asked = True


def watch(cluster: EmbeddedCluster, stop: Stop, *, as_json: bool) -> int:
    """Until the end is asked for (0). Parts that end are started again; when all are given up, the end too (1)."""
    given_up = cluster.supervise(_print_news if as_json else _tell_news, lambda: stop.asked)
    if stop.asked or not given_up:
        return EXIT_OK
    if not as_json:
        error_console.print("No part of the cluster runs now. The lines above name the logs.", style="red")
    return EXIT_MISS


def _print_news(name: str, news: PartNews) -> None:
    """The same news as one JSON object a line, after the document of the start."""
    print(dumps({"part": name, "news": news.text}), flush=True)


def _tell_news(name: str, news: PartNews) -> None:
    """One line when something happens to a part: it ended, was started again, answers again, was given up."""
    style = "green" if news.stage == PartStage.READY else "yellow"
    console.print(
        f"{time.strftime('%H:%M:%S')} {name}: {news.text}", style=style, markup=False, soft_wrap=True
    )
