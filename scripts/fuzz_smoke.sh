#!/usr/bin/env bash
# Builds the libFuzzer targets with clang, ASan and UBSan and runs each for a while, starting from its committed
# corpus. usage: fuzz_smoke.sh SECONDS JOBS. What a run discovers is kept in build/fuzz, not in the source tree.
set -euo pipefail

seconds=$1
jobs=$2
here=$(cd "$(dirname "$0")/.." && pwd)
if ! clang=$("$here/scripts/system.sh" clang); then
  echo "clang with libFuzzer not found (Debian packages clang-14 libclang-rt-14-dev): skipped"
  exit 0
fi
if ! ls "$here"/native/fuzz/*.cpp >/dev/null 2>&1; then
  echo "no fuzz target under native/fuzz"
  exit 1
fi

build=$here/build/fuzz
names=()
for source in "$here"/native/fuzz/*.cpp; do
  names+=("$(basename "$source" .cpp)")
done
TARGETS="${names[*]}" "$here/scripts/native_build.sh" "$build" "$jobs" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" \
  -DCMAKE_CXX_COMPILER="$clang" -DCMAKE_CXX_FLAGS="-fsanitize=fuzzer-no-link -fno-sanitize-recover=all" \
  -DMOONCACHE_SANITIZE=address,undefined -DMOONCACHE_FUZZ=ON -DMOONCACHE_TESTS=OFF -DMOONCACHE_EXAMPLES=OFF

for name in "${names[@]}"; do
  seeds=$here/native/fuzz/${name}_corpus
  found=$build/found-$name
  mkdir -p "$found"
  log=$build/$name.log
  if ! [ -d "$seeds" ]; then
    echo "$name: no corpus folder native/fuzz/${name}_corpus"
    exit 1
  fi
  if "$build/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$build/" "$found" "$seeds" >"$log" 2>&1; then
    echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, nothing found"
  else
    tail -n 80 "$log"
    echo "$name: FAILED; the input is in build/fuzz"
    exit 1
  fi
done
