#!/usr/bin/env bash
# Images of the targets that are named, each from a base by its digest, and each run: it has to say its version, not as root.
# usage: images.sh OUT "TARGET..."     OUT/images.txt says names, ids and sizes; OUT has an SBOM of each.
set -euo pipefail

out=$1
read -r -a targets <<<"$2"
here=$(cd "$(dirname "$0")/../.." && pwd)
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/services/_version.py")
declare -A lock=([core]=image [hf]=image-hf [vllm-cpu]=vllm-cpu)

[ ${#targets[@]} -gt 0 ] || exit 0
if ! docker info >/dev/null 2>&1; then
  echo "no images (${targets[*]}): no Docker engine answers" | tee -a "${RELEASE_LEFT_OUT:-/dev/null}"
  exit 0
fi
for target in "${targets[@]}"; do
  image=mooncache:$version-$target
  "$here/deploy/build.sh" "$image" "${RELEASE_BASE_IMAGE:-debian:12-slim}" --target "$target"
  said=$(docker run --rm --network none "$image" mooncache.cli --version)
  [[ $said == *"$version"* ]] || { echo "$image says '$said', not $version" >&2; exit 1; }
  user=$(docker run --rm --network none --entrypoint id "$image" -u)
  [ "$user" != 0 ] || { echo "$image runs as root" >&2; exit 1; }
  echo "$image $(docker image inspect --format '{{.Id}} {{.Size}} bytes' "$image")" | tee -a "$out/images.txt"
  [ -z "${lock[$target]:-}" ] || python3 "$here/scripts/sbom.py" "$out/$target.cdx.json" "${lock[$target]}"
done
