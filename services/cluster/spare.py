"""A process that is started ahead of need: it has imported its modules, and waits for the end of the one before it.

A node that was killed is back only when Python has imported everything that a node consists of. On two cores that is
longer than all the rest, and clients wait meanwhile.
"""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from typing import Final

SPARE_WORD: Final = "spare"
"""What the command line of such a process says (`mooncache.cluster.child`)."""
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SpareProcess:
    """It begins when it reads a byte, and ends when its parent does."""

    interpreter: str
    process: subprocess.Popen[bytes]

    def waits(self) -> bool:
        """Whether it can still begin."""
        return self.process.poll() is None

    def begin(self) -> bool:
        """Let it begin; False when it has ended."""
        assert self.process.stdin is not None
        try:
            with self.process.stdin as pipe:
                pipe.write(b"\n")
        except OSError:
            return False
        return self.waits()

    def end(self) -> None:
        """End it; it has nothing to finish."""
        self.process.kill()
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
