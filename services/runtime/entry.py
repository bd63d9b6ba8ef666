"""How a process of a service begins: its configuration, and the status that it exits with.

It imports no more than that: a service may begin with what takes long before it imports the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from mooncache.config import Config, load
from mooncache.errors import MooncacheError

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2


def main_of(run: Callable[[Config], int]) -> int:
    """What `python -m mooncache.<service>` does: read the configuration, run; 2 for a wrong configuration."""
    try:
        config = load()
    except MooncacheError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    return run(config)
