#!/usr/bin/env bash
# Runs every native test executable of one build folder, several at a time. usage: native_tests.sh BUILD_DIR [JOBS]
# Prints the one line summary of each and the whole output of those that fail.
set -euo pipefail

build=$1
jobs=${2:-$(nproc)}
run=()
# ThreadSanitizer of gcc 12 cannot live with the address randomisation of newer kernels.
if setarch "$(uname -m)" -R true 2>/dev/null; then
  run=(setarch "$(uname -m)" -R)
fi
export ASAN_OPTIONS="detect_stack_use_after_return=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"

one() { # EXECUTABLE: its line; 1 when it failed
  local test=$1 name log
  name=$(basename "$test")
  log="$build/$name.log"
  if timeout 900 "${run[@]}" "$test" --gtest_brief=1 >"$log" 2>&1; then
    echo "$name: $(sed -nE 's/^\[ +PASSED +\] ([0-9]+ tests?)\./\1/p' "$log" | tail -n 1) passed"
  else
    echo "$name: FAILED"
    tail -n 200 "$log"
    return 1
  fi
}

tests=()
for test in "$build"/test_*; do
  [ -x "$test" ] && [ -f "$test" ] && tests+=("$test")
done
if [ ${#tests[@]} -eq 0 ]; then
  echo "no native test was built (GoogleTest, Debian package libgtest-dev, is missing): skipped"
  exit 0
fi
failed=0
running=0
for test in "${tests[@]}"; do
  if [ "$running" -ge "$jobs" ]; then
    wait -n || failed=$((failed + 1))
    running=$((running - 1))
  fi
  one "$test" &
  running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
  wait -n || failed=$((failed + 1))
  running=$((running - 1))
done
if [ "$failed" -gt 0 ]; then
  echo "$failed of ${#tests[@]} native test programs failed"
  exit 1
fi
