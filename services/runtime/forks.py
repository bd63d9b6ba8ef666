"""What a forked child must leave alone."""

from __future__ import annotations

import ctypes


def leave_to_parent(thing: object) -> None:
    """Keep an object for as long as this process lives: its end would reach through shared descriptors."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
