"""Where functions of a C++ file begin and end, by its braces alone.

Comments, literals and preprocessor lines are blanked first. Outside of functions a brace opens a namespace or a class,
data, or a function: what has parentheses before it. Lambdas belong to the function that they stand in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BLANKED = re.compile(
    r'R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"'  # raw strings
    r"|//[^\n]*|/\*.*?\*/"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"  # not the quotes of 1'000
    r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"
    r"|\b(?:public|protected|private):",
    re.DOTALL | re.MULTILINE,
)
_SCOPE = re.compile(
    r"\s*(?:template\s*<[^{}]*>\s*)?(?:inline\s+)?(?:namespace|class|struct|union|enum|extern)\b"
)
_NAME = re.compile(r"(operator(?:\(\)|[^\s\w(]+)|[~\w:]+)\s*\(")


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield (name, lines from the head to the closing brace) of every function."""
    text = _BLANKED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    head = depth = opened = 0  # depth: of braces in what began at `head` and was opened at `opened`
    for brace in re.finditer(r"[{};]", text):
        at, sign = brace.start(), brace[0]
        if depth:
            depth += {"{": 1, "}": -1}.get(sign, 0)
            if depth or text[at + 1 :].lstrip().startswith((",", "{")):
                continue  # the latter: that was a member's first value, the body is still to come
            begin = at - len(text[head:at].lstrip())
            if name := _NAME.search(text, begin, opened):
                yield name[1], text.count("\n", begin, at) + 1
        elif sign == "{" and not _SCOPE.match(text, head):
            depth, opened = 1, at
            continue
        head = at + 1
