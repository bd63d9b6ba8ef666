"""`mooncache top`."""

from __future__ import annotations

from mooncache.cli.common import HERE, AsJson, Where


def top(*, where: Where = HERE, json: AsJson = False) -> int:
    """Live view.

    For example:

        mooncache top
    """
    return 0
