#!/usr/bin/env bash
# Runs pytest; a few tests that failed beside everything else have a second run, alone.
#
#   scripts/pytest_twice.sh LOG AGAIN PYTHON [arguments of pytest ...]
#
# LOG takes the output of both runs, AGAIN the names of the tests that passed only alone (it is absent when there are
# none). Thousands of tests with real processes run beside compilers on two cores that others use as well, so that a
# limit of time is missed now and then. A test that passes alone is reported, and is a defect to mend; a test that fails
# twice, or more than FEW of them, fails the run.
set -uo pipefail
FEW=5
log=$1 again=$2 python=$3
shift 3
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
rm -f "$again"

run() { "$python" -m pytest -q -o cache_dir="$cache" "$@" 2>&1; }
failed() { # the names of those that failed last, one a line
  "$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$cache/v/cache/lastfailed"
}

run "$@" | tee "$log"
status=${PIPESTATUS[0]}
# 1: tests failed. Anything else (nothing collected, a usage error, an interruption) has no second run.
if [ "$status" -ne 1 ] || ! names=$(failed) || [ "$(wc -l <<<"$names")" -gt "$FEW" ]; then exit "$status"; fi
printf '\n== a second run, alone, of what failed\n%s\n' "$names" | tee -a "$log"
run "$@" -n 0 --last-failed --last-failed-no-failures none | tee -a "$log"
status=${PIPESTATUS[0]}
if [ "$status" -eq 0 ]; then
  printf '%s\n' "$names" >"$again"
  printf '\npassed only in a second run, alone; mend them:\n%s\n' "$names" | tee -a "$log"
fi
exit "$status"
