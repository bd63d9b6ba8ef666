"""The files of the page, from the package: read once, served from memory by exact name.

They are plain HTML, CSS and ES modules, without a build step (docs/decisions/0059-the-console-has-no-build-step.md).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

PAGE: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page. `tag` changes with its bytes."""

    body: bytes
    content_type: str
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Every file by its name."""
    found = {}
    for entry in resources.files(__package__).joinpath("static").iterdir():
        kind = _TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None and entry.is_file():
            body = entry.read_bytes()
            found[entry.name] = PageFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found
