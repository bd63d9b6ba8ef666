"""`python -m mooncache.gateway`: run a gateway; settings come from the configuration."""

from __future__ import annotations

import sys

from mooncache.config import load
from mooncache.errors import MooncacheError


def main() -> int:
    """Run until a signal; 0 after a graceful end, 1 after a failure, 2 for a wrong configuration."""
    from mooncache.gateway.service import run

    try:
        config = load()
    except MooncacheError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
