"""A load whose blocks another instance is still computing: what has come, and whether more comes.

Idea: a stream belongs to one load. It waits for the blocks that are missing (core/awaited.py) and knows how many
leading blocks may be loaded (`ready`). The mover loads those, gives its thread back, and is called when more have come
or when nothing more comes. Nothing here blocks or locks: the mover calls it with its lock held, also for what the
watcher hears.

Times: the wait ends at `ended_s`; `hidden_s` are the seconds of moving bytes before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mooncache.client.results import WatchState
from mooncache.kvcache.core.awaited import AwaitedBlocks, NextStep
from mooncache.kvcache.transfers import TransferJob
from mooncache.kvcache.watcher import Watcher

NEWS_S: Final = 0.002
"""How often to hear of blocks that came."""
PATIENCE_S: Final = 5.0
"""With a pool that does not answer."""


class Stream:
    """The awaited blocks of one load.

    Args:
        deadline_s: until when to wait, of the monotonic clock.
        heard: takes what the watcher hears: positions of the job, and how the wait goes on.
        retry: called when it is time to look again.
    """

    def __init__(
        self,
        watcher: Watcher,
        job: TransferJob,
        deadline_s: float,
        heard: Callable[[Sequence[int], WatchState], None],
        retry: Callable[[], None],
    ) -> None:
        self._watcher = watcher
        self._job = job
        self._heard = heard
        self._retry = retry
        self._watch = 0
        self._failing_since_s: float | None = None
        self.deadline_s = deadline_s
        self.awaited = AwaitedBlocks(job.awaited, node=job.node, deadline_s=deadline_s)
        self.must_look = False
        self.is_parked = False
        self.ended_s: float | None = None
        self.hidden_s = 0.0

    @property
    def ready(self) -> int:
        """Leading blocks that may be loaded."""
        missing = self.awaited.missing
        return missing[0] if missing else len(self._job.keys)

    @property
    def missing_keys(self) -> list[bytes]:
        """What to look for."""
        return [self._job.keys[at] for at in self.awaited.missing]

    def begin(self, now_s: float) -> None:
        """Begin to wait."""
        self._follow(self.awaited.begin(now_s), now_s)

    def heard(self, positions: Sequence[int], state: WatchState, now_s: float) -> None:
        """The watcher says which of the job's blocks came, and how the wait goes on."""
        if state is not WatchState.MORE:
            self._watch = 0
        self._follow(self.awaited.heard(positions, state), now_s)

    def looked(self, present: Sequence[bool], now_s: float) -> None:
        """The pool says which of `missing_keys` it has."""
        self._failing_since_s = None
        came = [at for at, there in zip(self.awaited.missing, present, strict=True) if there]
        self._follow(self.awaited.looked(came, now_s), now_s)

    def look_failed(self, now_s: float) -> None:
        """The pool did not say it: it is asked again, for a while."""
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        self.awaited.retries += 1
        patient = now_s < min(self.deadline_s, self._failing_since_s + PATIENCE_S)
        self._follow(NextStep.RETRY if patient else NextStep.OVER, now_s)

    def end(self, now_s: float) -> None:
        """Nothing more is waited for."""
        self.must_look = False
        if self.ended_s is None:
            self.ended_s = now_s
        if self._watch:
            self._watcher.remove(self._watch)
            self._watch = 0

    def moved(self, begun_s: float, now_s: float) -> None:
        """Bytes were moved between these times."""
        end_s = now_s if self.ended_s is None else min(now_s, self.ended_s)
        self.hidden_s += max(0.0, end_s - begun_s)

    def _follow(self, step: NextStep, now_s: float) -> None:
        if self.ended_s is not None:
            return
        if step in {NextStep.DONE, NextStep.OVER}:
            self.end(now_s)
        elif step is NextStep.LOOK:
            self.must_look = True
        elif step is NextStep.RETRY:
            pause_s = min(self.awaited.pause_s, max(0.0, self.deadline_s - now_s))
            self._watcher.later(pause_s, self._retry)
        elif step is NextStep.WATCH:
            self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        watched = self.awaited.watched
        keys = b"".join(self._job.keys[at] for at in watched)

        def heard(positions: Sequence[int], state: WatchState) -> None:
            self._heard(watched if state is WatchState.ALL else [watched[at] for at in positions], state)

        self._watch = self._watcher.add(
            keys,
            heard,
            timeout_s=max(0.0, self.deadline_s - now_s),
            node=self.awaited.node,
            news_s=NEWS_S,
            session_token=self._job.session_token,
        )
