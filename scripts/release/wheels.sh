#!/usr/bin/env bash
# The sdist, then a wheel from it for each Python 3.11 to 3.13 that is found, each tried at once in a fresh environment.
# usage: wheels.sh PYTHON OUT
#
# Wheels are named manylinux_* by the oldest glibc that auditwheel finds to suffice; the name says which. Build on the
# oldest system that a release is for. Tools are those of requirements/release.txt, by hash. Needs an index or a folder of
# wheels (PIP_FIND_LINKS).
set -euo pipefail

python=$1
out=$2
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(-m pip --disable-pip-version-check --no-input)
quietly() { # COMMAND...: the words only when it fails
  "$@" >"$work/last.log" 2>&1 </dev/null || {
    tail -n 40 "$work/last.log"
    return 1
  }
}
locked() { # FOLDER PYTHON NAME: a fresh environment of what requirements/NAME.txt says
  "$2" -m venv "$1"
  quietly "$1/bin/python" "${pip[@]}" install --no-deps --require-hashes -r "$here/requirements/$3.txt"
}

"$here/scripts/release/interpreters.sh" >"$work/interpreters"
mapfile -t interpreters <"$work/interpreters"
if [ ${#interpreters[@]} -eq 0 ]; then
  echo "no Python 3.11 to 3.13 with headers was found; name some in RELEASE_PYTHONS" >&2
  exit 1
fi

locked "$work/tools" "$python" release
tools=$work/tools/bin
quietly "$tools/python" -m build --sdist --no-isolation --outdir "$out" "$here"
sdist=$(ls "$out"/mooncache-*.tar.gz)
echo "$(basename "$sdist"): $(stat -c %s "$sdist") bytes"

for interpreter in "${interpreters[@]}"; do
  version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "Python $version: $interpreter"
  locked "$work/build-$version" "$interpreter" build
  bin=$work/build-$version/bin
  PATH="$bin:$PATH" quietly "$bin/python" "${pip[@]}" wheel --no-deps --no-build-isolation -w "$work/wheel-$version" "$sdist"
  made=$(ls "$work/wheel-$version"/*.whl)
  PATH="$tools:$PATH" quietly "$tools/auditwheel" repair --wheel-dir "$out" "$made"
  wheel=$(ls "$out"/*-cp"${version/./}"-*manylinux*.whl)
  "$here/scripts/release/check_wheel.sh" "$interpreter" "$wheel"
done
