"""The kinds of memory that a node's arena may be."""

from __future__ import annotations

from enum import StrEnum


class ArenaKind(StrEnum):
    """What the memory of an arena is, as the native server and messages name it."""

    MEMORY = "memory"
    HUGETLBFS = "hugetlbfs"
    TMPFS = "tmpfs"
    DAX = "dax"
    FSDAX = "fsdax"
    FILE = "file"
    GPU = "gpu"
