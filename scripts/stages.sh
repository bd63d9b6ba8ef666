#!/usr/bin/env bash
# Runs stages of `make test` and says at the end which of them failed, and what failed in them.
#
#   scripts/stages.sh LOG COMMAND [ARGUMENT ...]
#
# The stages run side by side and take most of an hour: what one of them said at its end may stand thousands of lines
# above the last line. LOG takes the whole output.
set -uo pipefail
log=$1
shift
mkdir -p "$(dirname "$log")"

running=$(mktemp "$log.XXXXXX") # `make -n test`, which a test runs, comes here as well
"$@" 2>&1 | tee "$running"
status=${PIPESTATUS[0]}
mv "$running" "$log"
if [ "$status" -ne 0 ]; then
  printf '\n== failed\n'
  # pytest: FAILED or ERROR and a name. Native tests: a program, and the tests in it. Sanitizers and fuzzers: ==pid==ERROR.
  grep -aE '^(FAILED|ERROR) |^(test|fuzz)_[a-z_0-9]+: FAILED|^\[  FAILED  \] [A-Za-z]|^==[0-9]+==ERROR|^WARNING: ThreadSanitizer' "$log" |
    grep -avFf <(cat "$(dirname "$log")/pytest-again" 2>/dev/null) | sort -u # without what passed in its second run
  grep -aE '^make.*\*\*\* \[' "$log"
  printf 'the whole output: %s\n' "$log"
fi
exit "$status"
