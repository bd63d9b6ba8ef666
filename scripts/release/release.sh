#!/usr/bin/env bash
# Everything that a release hands out, each part tried somewhere clean, and what this machine could not make.
# usage: release.sh PYTHON OUT
#
#   OUT/   sdist, a wheel for each Python 3.11 to 3.13 that is found, the chart, SBOMs, images.txt, SHA256SUMS
#
# PYTHON has the developer tools (make develop). RELEASE_PYTHONS names interpreters (default: those on PATH and of pyenv),
# RELEASE_IMAGES the targets of deploy/Dockerfile (default "core hf"; "" builds none), RELEASE_ENGINE=hf has wheels answer a
# request with the small engine, too (gigabytes). What is missing on this machine is left out, said, and written to
# OUT/left-out.txt; what is there and fails makes this fail.
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

step() { printf '\n== %s\n' "$1"; }

step 'sdist, and wheels from it'
"$parts/wheels.sh" "$python" "$out"
step 'chart'
"$parts/chart.sh" "$out"
step 'what it is made of'
"$python" "$here/scripts/sbom.py" "$out/mooncache.cdx.json"
step 'images'
"$parts/images.sh" "$out" "${RELEASE_IMAGES-core hf}"
step 'checksums'
(cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum >SHA256SUMS)
(cd "$out" && sha256sum --quiet --check SHA256SUMS && cat SHA256SUMS)
if [ -s "$RELEASE_LEFT_OUT" ]; then
  step 'not made on this machine'
  cat "$RELEASE_LEFT_OUT"
fi
