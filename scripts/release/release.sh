#!/usr/bin/env bash
# Everything that a release hands out, each part tried somewhere clean, and what this machine could not make.
# usage: release.sh PYTHON OUT
#
#   OUT/   sdist, a wheel for each Python 3.11 to 3.13 that is found, the chart, SBOMs, images.txt, SHA256SUMS
#
# PYTHON: 3.11 or newer with venv. RELEASE_PYTHONS names interpreters (default: those on PATH and of pyenv), RELEASE_IMAGES the
# targets of deploy/Dockerfile (default "core hf"; "" builds none), RELEASE_BASE_IMAGE what they stand on, RELEASE_ENGINE=hf has
# wheels answer a request with the small engine, too (gigabytes). What is missing on this machine is left out, said, and
# written to OUT/left-out.txt; what is there and fails makes this fail.
set -euo pipefail

python=$1
out=$2
here=$(cd "$(dirname "$0")/../.." && pwd)
parts=$here/scripts/release
mkdir -p "$out"
out=$(cd "$out" && pwd)
rm -rf "${out:?}"/*
export RELEASE_LEFT_OUT=$out/left-out.txt
: >"$RELEASE_LEFT_OUT"

step() { # TITLE COMMAND...
  local began_s=$SECONDS
  printf '\n== %s\n' "$1"
  "${@:2}"
  echo "($((SECONDS - began_s)) s)"
}
checksums() {
  cd "$out"
  find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum >SHA256SUMS
  sha256sum --quiet --check SHA256SUMS
  cat SHA256SUMS
}

step 'sdist, and wheels from it' "$parts/wheels.sh" "$python" "$out"
step 'chart' "$parts/chart.sh" "$out"
step 'what it is made of' "$python" "$here/scripts/sbom.py" "$out/mooncache.cdx.json"
step 'images' "$parts/images.sh" "$python" "$out" "${RELEASE_IMAGES-core hf}"
step 'checksums' checksums
printf '\n== left out\n'
if [ -s "$RELEASE_LEFT_OUT" ]; then cat "$RELEASE_LEFT_OUT"; else echo nothing; fi
