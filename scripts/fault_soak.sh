#!/bin/bash
# The storage tests that kill, tear and damage at random places, with one seed after another.
#   scripts/fault_soak.sh PROGRAM FIRST_SEED SEEDS
set -u -o pipefail
program=$1 first=$2 count=$3
filter='DiskFaults*:Kept*:ObjectListing*'
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for ((seed = first; seed < first + count; ++seed)); do
  if ! MOONCACHE_FAULT_SEED=$seed "$program" --gtest_filter="$filter" >"$log" 2>&1; then
    cat "$log"
    printf 'seed %d fails; to repeat it: MOONCACHE_FAULT_SEED=%d %s --gtest_filter=%q\n' \
      "$seed" "$seed" "$program" "$filter"
    exit 1
  fi
  printf 'storage faults, seed %d: %s\n' "$seed" "$(grep -o '[0-9]* tests.* ran' "$log" | tail -1)"
done
