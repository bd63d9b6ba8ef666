#!/usr/bin/env bash
# Images of the targets that are named, each from a base by its digest, and each run where nothing else is: not as root and
# without a network, it says its version and does what try.sh asks (in the image hf with its engine).
# usage: images.sh PYTHON OUT "TARGET..."     OUT/images.txt says names, ids and sizes; OUT has an SBOM of each.
#
# RELEASE_BASE_IMAGE: what they stand on. If deploy/wheelhouse has wheels (deploy/wheelhouse.py), packages come from there
# alone. Targets that are not named are left out, and said.
set -euo pipefail

python=$1
out=$2
read -r -a targets <<<"$3"
parts=$(cd "$(dirname "$0")" && pwd)
here=$(cd "$parts/../.." && pwd)
base=${RELEASE_BASE_IMAGE:-debian:12-slim}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/services/_version.py")
declare -A lock=([core]=image [hf]=image-hf [vllm-cpu]=vllm-cpu)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

left_out() { echo "$1" | tee -a "${RELEASE_LEFT_OUT:-/dev/null}"; }
inside() { docker run --rm --network none --entrypoint "$2" "$1" "${@:3}"; } # IMAGE PROGRAM ARGUMENTS...
fail() {
  echo "$1" >&2
  exit 1
}

for target in core hf vllm-cpu vllm-cuda; do
  [[ " ${targets[*]} " == *" $target "* ]] || left_out "no image $target: RELEASE_IMAGES does not name it"
done
[ ${#targets[@]} -gt 0 ] || exit 0
if ! docker info >/dev/null 2>&1; then
  left_out "no images (${targets[*]}): no Docker engine answers"
  exit 0
fi
if compgen -G "$here/deploy/wheelhouse/*.whl" >/dev/null; then
  export PIP_NO_INDEX=1
  echo "packages come from deploy/wheelhouse alone"
fi
for target in "${targets[@]}"; do
  image=mooncache:$version-$target
  began_s=$SECONDS
  "$here/deploy/build.sh" "$image" "$base" --target "$target" >"$work/build.log" 2>&1 || {
    tail -n 60 "$work/build.log"
    fail "$image could not be built"
  }
  took_s=$((SECONDS - began_s))
  digest=$(docker image inspect --format '{{index .Config.Labels "org.opencontainers.image.base.digest"}}' "$image")
  [[ $digest == sha256:* ]] || fail "$image does not say the digest of its base"
  said=$(docker run --rm --network none "$image" mooncache.cli --version)
  [[ $said == *"$version"* ]] || fail "$image says '$said', not $version"
  [ "$(inside "$image" id -u)" != 0 ] || fail "$image runs as root"
  engine=none
  [ "$target" = hf ] && engine=hf
  inside "$image" bash -c "$(cat "$parts/try.sh")" try.sh "$engine"
  echo "$image $(docker image inspect --format '{{.Id}} {{.Size}} bytes' "$image"), built in $took_s s" | tee -a "$out/images.txt"
  if [ -n "${lock[$target]:-}" ]; then
    inside "$image" sh -c '. /etc/os-release && dpkg-query -W -f "$ID \${Package} \${Version} \${Architecture}\n"' >"$work/packages"
    "$python" "$here/scripts/sbom.py" "$out/$target.cdx.json" "${lock[$target]}" "$work/packages"
  else
    left_out "no SBOM of the image $target: no lock names its packages"
  fi
done
