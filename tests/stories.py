"""Stories: scenarios as text, with the code's answers below each step.

    # A remark says what the paragraph shows.
    nodes a b
    show nodes
    ----
    a  active  0 blocks
    b  active  0 blocks

A paragraph has remarks, commands (one a line) and, below ----, all that the commands answered. One without ---- has
commands that answer nothing. The command `replicate b1 copies=2` calls `do_replicate("b1", copies="2")` of the folder's
vocabulary, which drives production code. `pytest --rewrite` writes the present answers into the files.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

MARK = "----"


@dataclass(frozen=True)
class Paragraph:
    """`head` is remarks and commands as written; `answers` is what stands below the mark, None without one."""

    line: int
    head: tuple[str, ...]
    answers: tuple[str, ...] | None

    def commands(self) -> list[tuple[int, str]]:
        """Return (line in the file, command)."""
        numbered = enumerate(self.head, self.line)
        return [(number, text) for number, text in numbered if text.strip() and not text.startswith("#")]

    def with_answers(self, answers: list[str]) -> str:
        """Return the paragraph's text with other answers; the mark stays when there are none."""
        below = [MARK, *answers] if answers or self.answers is not None else []
        return "\n".join((*self.head, *below))


def paragraphs(text: str) -> list[Paragraph]:
    """Cut a story at its blank lines."""
    found = []
    for block in re.finditer(r"[^\n]+(?:\n[^\n]+)*", text):
        lines = tuple(line.rstrip() for line in block[0].split("\n"))
        at = lines.index(MARK) if MARK in lines else len(lines)
        answers = lines[at + 1 :] if at < len(lines) else None
        found.append(Paragraph(text.count("\n", 0, block.start()) + 1, lines[:at], answers))
    return found


async def obey(vocabulary: object, command: str) -> list[str]:
    """Carry one command out; return the lines that it answers. Raises TypeError for a command that is wrong."""
    name, *words = command.split()
    method: Callable[..., Awaitable[object] | object] | None = getattr(
        vocabulary, f"do_{name.replace('-', '_')}", None
    )
    if method is None:
        known = sorted(
            word.removeprefix("do_").replace("_", "-") for word in dir(vocabulary) if word.startswith("do_")
        )
        raise TypeError(f"there is no command {name!r}; known: {', '.join(known)}")
    named = dict(word.split("=", 1) for word in words if "=" in word)
    plain = [word for word in words if "=" not in word]
    inspect.signature(method).bind(*plain, **named)
    answer = method(*plain, **named)
    if inspect.isawaitable(answer):
        answer = await answer
    lines = str(answer).split("\n") if answer is not None else []
    return [line.rstrip() for line in lines if line.strip()]


async def played(text: str, vocabulary: object) -> str:
    """Run a story to its end; return its text with the answers that it gave now."""
    reported = []
    for paragraph in paragraphs(text):
        answers: list[str] = []
        for line, command in paragraph.commands():
            try:
                answers += await obey(vocabulary, command)
            except Exception as error:
                error.add_note(f"line {line} of the story: {command}")
                raise
        reported.append(paragraph.with_answers(answers))
    return "\n\n".join(reported) + "\n"


def compare(path: Path, now: str, *, rewrite: bool) -> None:
    """Fail the test when a story went otherwise than its file says, unless that is to be written down."""
    written = path.read_text(encoding="utf-8")
    if now == written:
        return
    if rewrite:
        path.write_text(now, encoding="utf-8")
        return
    lines = difflib.unified_diff(
        written.split("\n"), now.split("\n"), "as written", "as played", n=8, lineterm=""
    )
    advice = f"When the new answers are right: .venv/bin/pytest {os.path.relpath(path.parent)} --rewrite"
    pytest.fail(f"{path.name} went otherwise.\n\n" + "\n".join((*lines, "", advice)), pytrace=False)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as columns two spaces apart; a missing cell is empty."""
    columns = [[str(cell) for cell in column] for column in itertools.zip_longest(*rows, fillvalue="")]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True))
