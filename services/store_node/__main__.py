"""`python -m mooncache.store_node`: run a store node; settings come from the configuration."""

from __future__ import annotations

import sys

from mooncache.runtime.service import main_of, run_service


def main() -> int:
    """Run until a signal; 0 after a graceful end, 1 after a failure, 2 for a wrong configuration."""
    from mooncache.store_node.service import StoreNodeService

    return main_of(lambda config: run_service("store_node", config, lambda: StoreNodeService(config)))


if __name__ == "__main__":
    sys.exit(main())
