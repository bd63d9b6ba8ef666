#!/usr/bin/env bash
# Tries a wheel as a user gets it: a fresh environment, an empty home, nothing of the checkout; then try.sh, with the small
# engine if RELEASE_ENGINE=hf. usage: check_wheel.sh INTERPRETER WHEEL
set -euo pipefail

interpreter=$1
wheel=$(realpath "$2")
try=$(cd "$(dirname "$0")" && pwd)/try.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home"

"$interpreter" -m venv "$work/venv"
bin=$work/venv/bin
extra=
[ "${RELEASE_ENGINE:-}" = hf ] && extra='[hf]'
"$bin/python" -m pip --disable-pip-version-check --no-input install "$wheel$extra" >"$work/pip.log" 2>&1 || {
  tail -n 40 "$work/pip.log"
  exit 1
}
cd "$work/home"
env -i HOME="$work/home" TMPDIR="$work" PATH="$bin:/usr/bin:/bin" LANG=C.UTF-8 "$try" "${RELEASE_ENGINE:-none}" </dev/null
echo "$(basename "$wheel"): installed and used"
