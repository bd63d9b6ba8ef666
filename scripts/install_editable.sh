#!/usr/bin/env bash
# pip install -e . without build isolation: first what [build-system] names, then the project.
# usage: install_editable.sh PYTHON EXTRAS, where EXTRAS is like [dev] or empty
set -euo pipefail

python=$1
extras=$2
pip=("$python" -m pip --disable-pip-version-check --no-input install -q)
mapfile -t requires < <("$python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")')
"${pip[@]}" "${requires[@]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# pip shows the compiler's words only when told to be verbose; keep them for the case of failure.
if ! "${pip[@]}" --no-build-isolation -e ".$extras" -v >"$log" 2>&1; then
  tail -n 100 "$log"
  echo "mooncache could not be built and installed; the last lines above say why"
  exit 1
fi
