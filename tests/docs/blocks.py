"""The command blocks of the pages: found, told apart by how they begin, and run as they stand.

A block is named by its page and the beginning of its first command. `REGISTRY` in registry.py says of each which test
runs it or why none can. What a test may change in a block before it runs is declared there, too: names of hosts, ports,
folders, sizes. A change that is not found in the block fails, so that no declaration outlives its page.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from tests.conditions import wait_until
from tests.processes import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("sh", "bash", "console", "shell")
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A block without a language that shows what a program prints may hold a command as well: it counts, too.
_COMMAND = re.compile(
    r"^(\$ |(\w+=\S+ )*(mooncache|make|curl|pip|python3?|vllm|docker|ip|sudo) )", re.MULTILINE
)
LIMIT_S = 120.0


def pages() -> list[Path]:
    """Every page for readers: README, CONTRIBUTING, ARCHITECTURE and all of docs."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block: its page relative to the repository, and its text without the fences."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        """The block from its first command on."""
        return re.sub(r"\A(\s*(#.*)?\n)*", "", self.text)

    def commands(self) -> list[str]:
        """Its commands one by one: a line with what its backslash continues, without comments."""
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        bare = [re.sub(r"(^|\s+)# .*", "", line).strip() for line in lines]
        return [line for line in bare if line]


@cache
def all_blocks() -> tuple[Block, ...]:
    """Every command block of every page."""
    found = []
    for page in pages():
        for language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
            if language in SHELLS or (not language and _COMMAND.search(text)):
                found.append(Block(str(page.relative_to(ROOT)), language, text))
    return tuple(found)


def block(page: str, begins: str) -> Block:
    """The one block of a page whose first command begins so."""
    found = [one for one in all_blocks() if one.page == page and one.first.startswith(begins)]
    assert len(found) == 1, f"{len(found)} blocks of {page} begin with {begins!r}"
    return found[0]


def changed(text: str, swaps: Mapping[str, str]) -> str:
    """The text with the declared changes. Each must be found."""
    for old, new in swaps.items():
        assert old in text, f"the block does not say {old!r} any more:\n{text}"
        text = text.replace(old, new)
    return text


def environment(**more: str) -> dict[str, str]:
    """Of a user's shell: the package's commands on the path, no settings of a developer."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(("MOONCACHE_", "MAKE"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**base, "PATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more}


def run_script(
    text: str,
    folder: Path,
    env: Mapping[str, str],
    *,
    before: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> str:
    """What a shell prints that runs the text as a script; raises with all of it when a command fails."""
    script = folder / "block.sh"  # a command line with the text would be found by the block's own pkill
    script.write_text(f"set -euo pipefail\n{text}")
    done = subprocess.run(
        [*before, "bash", str(script)],
        cwd=folder,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode} of:\n{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass
class Terminal:
    """A command in the foreground of a terminal of its own, until Ctrl-C."""

    command: str
    process: subprocess.Popen[bytes]
    log: Path
    _file: IO[bytes] = field(repr=False)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, limit_s: float = LIMIT_S) -> None:
        """Until it has printed the words."""

        def printed() -> bool:
            has_ended = self.process.poll() is not None
            if words in self.said():
                return True
            assert not has_ended, f"{self.command} ended:\n{self.said()}"
            return False

        wait_until(printed, lambda: f"{self.command} did not print {words!r}:\n{self.said()}", limit_s)

    def ctrl_c(self, limit_s: float = 40.0) -> int:
        """Ends it as a user does; the exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(limit_s)
            raise AssertionError(f"{self.command} did not end by Ctrl-C:\n{self.said()}") from None
        finally:
            self._file.close()


@contextmanager
def terminals() -> Iterator[list[Terminal]]:
    """A list that ends its terminals, the newest first; open them with `open_terminal`."""
    opened: list[Terminal] = []
    with ExitStack() as ending:
        try:
            yield opened
        finally:
            for terminal in opened:
                ending.callback(terminal.ctrl_c)


def open_terminal(
    opened: list[Terminal], command: str, folder: Path, env: Mapping[str, str], before: tuple[str, ...] = ()
) -> Terminal:
    """Runs the command in a shell that it replaces, so that Ctrl-C and its exit code are its own."""
    log = folder / f"terminal-{len(opened)}.log"
    file = log.open("wb")
    assignments = re.match(r"(?:[A-Z_]+=\S+\s+)*", command)
    assert assignments
    line = f"{assignments[0]}exec {command[assignments.end() :]}"
    process = subprocess.Popen(
        [*before, "bash", "-c", line],
        cwd=folder,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    opened.append(Terminal(command, process, log, file))
    return opened[-1]
