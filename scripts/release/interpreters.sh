#!/usr/bin/env bash
# Python interpreters that a release has wheels for, one line each, 3.11 first: of RELEASE_PYTHONS, else of PATH and pyenv.
# One without headers cannot compile. A version that is not found is said on stderr and in $RELEASE_LEFT_OUT.
set -euo pipefail

for version in 3.11 3.12 3.13; do
  read -r -a candidates <<<"${RELEASE_PYTHONS-$(command -v "python$version" || true) $(echo "$HOME/.pyenv/versions/$version".*/bin/python)}"
  found=
  for candidate in "${candidates[@]}"; do
    if "$candidate" - "$version" >/dev/null 2>&1 <<'PROBE'; then
import pathlib, sys, sysconfig, venv
assert f"{sys.version_info[0]}.{sys.version_info[1]}" == sys.argv[1]
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
PROBE
      found=$candidate
      break
    fi
  done
  if [ -n "$found" ]; then
    echo "$found"
  else
    echo "no wheel for Python $version: there is no such interpreter with headers" | tee -a "${RELEASE_LEFT_OUT:-/dev/null}" >&2
  fi
done
