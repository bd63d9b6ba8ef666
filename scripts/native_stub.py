"""Writes services/_native.pyi, what type checkers know of the extension, from the built extension itself.

`--check` fails when the committed stub declares something else. Docstrings and layout are not compared: they
may differ between versions of the generator.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parent.parent / "services" / "_native.pyi"
# What containers hold, and that blocks are buffers, which the bindings say in words only.
CONTENTS = {
    "config: dict)": "config: dict[str, Any])",
    "settings: dict)": "settings: dict[str, Any])",
    "options: dict)": "options: dict[str, Any])",
    "nodes: list)": "nodes: list[dict[str, object]])",
    "nodes: list,": "nodes: list[dict[str, object]],",
    "dict | None]": "dict[str, Any] | None]",
    "table: list,": "table: list[tuple[int, str, bytes]],",
    "wanted: int) -> tuple:": "wanted: int) -> tuple[bool, int, str]:",
    "rails: list, peer: object,": "rails: list[tuple[str, bytes]], peer: tuple[str, bytes],",
    "def slot(self, number: int) -> tuple:": "def slot(self, number: int) -> tuple[int, int]:",
    'size: int) -> tuple:\n        """(handle': 'size: int) -> tuple[bytes, int]:\n        """(handle',
    "size: int) -> tuple:": "size: int) -> tuple[int, int, int]:",
    "node: int | None = None) -> list:": "node: int | None = None) -> list[ReceivedBlock | bytes | int]:",
    'goes back with the object.\n    """\n': 'goes back with the object.\n    """\n\n'
    "    def __buffer__(self, flags: int, /) -> memoryview: ...\n",
    "grants: list,": "grants: list[tuple[str, int, int, bool, bool]],",
    "grants: list)": "grants: list[tuple[str, int, int, bool, bool]])",
    "copies: list,": "copies: list[tuple[Any, int, int]],",
    'mapped as long as anyone has it.\n    """\n': 'mapped as long as anyone has it.\n    """\n\n'
    "    def __buffer__(self, flags: int, /) -> memoryview: ...\n",
    "-> list:": "-> list[dict[str, Any]]:",
    "-> dict:": "-> dict[str, Any]:",
}


def generate(target: Path) -> str:
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "mooncache._native", "-o", str(target)]
    subprocess.run(command, check=True)
    text = target.read_text(encoding="utf-8")
    for bare, whole in CONTENTS.items():
        if bare not in text:
            raise SystemExit(f"nothing in the extension is declared as {bare!r}; remove it from CONTENTS")
        text = text.replace(bare, whole)
    target.write_text(text, encoding="utf-8")
    return text


def declarations(text: str) -> str:
    """The stub without docstrings, in one canonical layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        generate(STUB)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder) / "_native.pyi")
    if not STUB.exists() or declarations(fresh) != declarations(STUB.read_text(encoding="utf-8")):
        raise SystemExit("services/_native.pyi is out of date; run `make stub` and commit it")


if __name__ == "__main__":
    main()
