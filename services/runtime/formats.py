"""Versions of what two processes speak and of what outlives a process, as this version of Mooncache has them.

A process of the next version and one of the former meet in every upgrade. docs/upgrades.md has the same as a table, and
tests compare the numbers with the native code. A number changes only when the other side could not go on without it.
"""

from __future__ import annotations

from typing import Final

DATA_PLANE: Final = "data_plane"
CONTROL_MINOR: Final = "control_minor"
KEPT_MEMORY: Final = "kept_memory"
DISK: Final = "disk"
CONTROL_MINOR_NOW: Final = 1
CONTROL_MINOR_AHEAD_MAX: Final = 1
"""How far ahead of its master a node may be."""
FORMATS: Final = {DATA_PLANE: 1, CONTROL_MINOR: CONTROL_MINOR_NOW, KEPT_MEMORY: 1, DISK: 1}
