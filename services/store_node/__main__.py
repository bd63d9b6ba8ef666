"""`python -m mooncache.store_node`: run a store node; settings come from the configuration."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncache.config import Config


def main() -> int:
    """Run until a signal; 0 after a graceful end, 1 after a failure, 2 for a wrong configuration."""
    _import_fast()
    from mooncache.runtime.entry import main_of

    return main_of(_run)


def import_all() -> None:
    """Import all that a node consists of, ahead of its start."""
    _import_fast()
    import mooncache.runtime.entry
    import mooncache.runtime.service
    import mooncache.store_node.opening
    import mooncache.store_node.service  # noqa: F401


def _import_fast() -> None:
    """Clients of a node that was killed wait for its next process, so it imports without what only takes time.

    That is pydantic's search for plugins among all packages, and looks for garbage where there is none yet.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()


def _run(config: Config) -> int:
    from mooncache.store_node.opening import early_opening

    opening = early_opening(config)  # before the imports below: they take as long as it does
    try:
        from mooncache.runtime.service import run_service
        from mooncache.store_node.service import StoreNodeService

        gc.freeze()  # modules stay
        gc.enable()
        return run_service("store_node", config, lambda: StoreNodeService(config, opening))
    finally:
        if opening is not None:
            opening.close()


if __name__ == "__main__":
    sys.exit(main())
