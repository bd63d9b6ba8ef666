"""`python -m mooncache.bench.gpu --json FILE`: all checks that want a GPU, in under eight minutes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from mooncache.bench.gpu import checks
from mooncache.bench.gpu.engine_case import EngineOptions


def main() -> int:
    """0: every check passed; 1: one did not, or there is no GPU. The file is written in both cases."""
    usual = EngineOptions()
    parser = argparse.ArgumentParser(prog="python -m mooncache.bench.gpu", description=checks.__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu-checks.json"), help="file for the result")
    parser.add_argument("--only", action="append", help="only this check; may be given again")
    parser.add_argument("--layers", type=int, default=usual.layers, help="layers of the engine's model")
    parser.add_argument("--device", default=usual.device, help="the engine's torch device")
    given = parser.parse_args()
    wanted = checks.all_checks(replace(usual, layers=given.layers, device=given.device))
    unknown = set(given.only or ()) - set(wanted)
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}; choose from {', '.join(wanted)}")
    chosen = {name: check for name, check in wanted.items() if not given.only or name in given.only}
    result = checks.run(chosen, lambda text: print(text, file=sys.stderr, flush=True))
    checks.write(result, given.json)
    for name, found in result["checks"].items():
        print(f"{name}: {'ok' if found['ok'] else found.get('why') or found.get('missed')}")
    print(f"{given.json}: {len(result['rows'])} rows, {result['seconds']} s")
    return 0 if all(found["ok"] for found in result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
