#!/usr/bin/env bash
# The Helm chart as a package, checked as one: linted and rendered with each of the tests' value sets.
# usage: chart.sh OUT
set -euo pipefail

out=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
helm=${MOONCACHE_TEST_HELM:-$(PATH="$PATH:$here/.venv/bin" command -v helm || true)}
if [ -z "$helm" ]; then
  echo "no chart: helm is neither on PATH nor in MOONCACHE_TEST_HELM" | tee -a "${RELEASE_LEFT_OUT:-/dev/null}"
  exit 0
fi
chart=$here/deploy/helm/mooncache
quietly() { # COMMAND...: helm names each linked file; its words only when it fails
  "$@" 2>"$work/words" || {
    cat "$work/words" >&2
    return 1
  }
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
quietly "$helm" package "$chart" --destination "$out" >/dev/null
package=$(ls "$out"/mooncache-[0-9]*.tgz)
for values in "$here"/tests/deploy/helm_values/*.yaml; do
  quietly "$helm" lint --quiet "$package" --values "$values"
  quietly "$helm" template check "$package" --namespace check --values "$values" >"$work/objects"
  echo "$(basename "$package") with $(basename "$values"): $(grep -c '^kind:' "$work/objects") objects"
done
