"""`python -m mooncache.hf_engine --model FOLDER`: run the engine; other settings come from the configuration."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mooncache.config import load
from mooncache.errors import MooncacheError

KEY_VARIABLE = "MOONCACHE_ENGINE_API_KEY"


def main() -> int:
    """Run until a signal; 0 after a graceful end, 1 after a failure, 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(
        prog="mooncache.hf_engine",
        description="A small engine with an OpenAI API. Sections [hf] and [connector] of the configuration apply; "
        f"the key of the API comes from {KEY_VARIABLE}.",
    )
    parser.add_argument(
        "--model", required=True, help="folder of the model, or an id that is on this machine"
    )
    parser.add_argument("--served-model-name", default="", help="name for clients; default: the folder's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--passport-path", type=Path, help="file to write the passport to")
    parser.add_argument("--ssl-certfile", type=Path, help="PEM certificate; the port then speaks HTTPS")
    parser.add_argument("--ssl-keyfile", type=Path, help="PEM key of that certificate")
    given = parser.parse_args()
    # Taken out of the environment: it is not a setting, and children do not need it.
    api_key = os.environ.pop(KEY_VARIABLE, "")
    try:
        config = load()
    except MooncacheError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    from mooncache.hf_engine.service import HfOptions, run

    options = HfOptions(
        model=given.model,
        served_model_name=given.served_model_name,
        host=given.host,
        port=given.port,
        passport_path=given.passport_path,
        tls_cert=given.ssl_certfile,
        tls_key=given.ssl_keyfile,
        api_key=api_key,
    )
    return run(config, options)


if __name__ == "__main__":
    sys.exit(main())
