#!/usr/bin/env bash
# Configures native/ in a build folder and builds it, with tests and examples unless the options say otherwise.
# usage: [TARGETS="NAME..."] native_build.sh BUILD_DIR JOBS CMAKE_OPTION...
# Quiet when all is well: the compiler's warnings are counted, its whole output is in BUILD_DIR.log.
set -euo pipefail

build=$1
jobs=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
log=$build.log
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$here}
configure=(cmake -S "$here/native" -B "$build" -G Ninja -Wno-dev -DMOONCACHE_TESTS=ON -DMOONCACHE_EXAMPLES=ON "$@")
read -r -a targets <<<"${TARGETS:-all}"

mkdir -p "$build"
if ! { "${configure[@]}" && cmake --build "$build" -j "$jobs" --target "${targets[@]}"; } >"$log" 2>&1; then
  grep -nE 'error|FAILED' "$log" | head -n 20
  tail -n 60 "$log"
  echo "the native build in $build failed; all of its output: $log"
  exit 1
fi
warnings=$(grep -c 'warning:' "$log" || true)
if [ "$warnings" -gt 0 ]; then
  grep 'warning:' "$log" | sort -u | head -n 10
  echo "$warnings compiler warnings; see $log"
fi
