"""`python -m mooncache.worker`: run a worker; settings come from the configuration.

`--engine-key` writes the key that an engine started by hand has to ask for (VLLM_API_KEY) and ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mooncache.config import load
from mooncache.errors import MooncacheError


def main(arguments: Sequence[str] = ()) -> int:
    """Run until a signal; 0 after a graceful end, 1 after a failure, 2 for a wrong configuration."""
    from mooncache import auth
    from mooncache.worker.service import run

    try:
        config = load()
        if list(arguments) == ["--engine-key"]:
            cluster, _ = auth.load_or_create_cluster_token(config.cluster.token_path)
            sys.stdout.write(auth.engine_key(cluster) + "\n")
            return 0
        if arguments:
            sys.stderr.write("usage: python -m mooncache.worker [--engine-key]\n")
            return 2
    except MooncacheError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
