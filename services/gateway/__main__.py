"""`python -m mooncache.gateway`: run a gateway; settings come from the configuration."""

from __future__ import annotations

import sys

from mooncache.runtime.entry import main_of


def main() -> int:
    """Run until a signal; 0 after a graceful end, 1 after a failure, 2 for a wrong configuration."""
    from mooncache.gateway.service import run

    return main_of(run)


if __name__ == "__main__":
    sys.exit(main())
