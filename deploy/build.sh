#!/usr/bin/env bash
# Builds an image for a release: the base image's tag is resolved to its digest first, the build takes exactly that one,
# and the image says which it was. PIP_INDEX_URL, PIP_NO_INDEX and TORCH_INDEX_URL reach the build where they are set.
# usage: deploy/build.sh IMAGE [BASE_IMAGE] [ARGUMENT OF docker build...]
# for example: deploy/build.sh mooncache:core debian:12-slim --target core
set -euo pipefail

image=$1
base=${2:-debian:12-slim}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/.."
# Of an image that was made on this machine (docker import) no registry knows a digest: its id is the digest of its content.
made_here=$(docker image inspect --format '{{if not .RepoDigests}}{{.Id}}{{end}}' "$base" 2>/dev/null) || made_here=
case $base in
  *@sha256:*) pinned=$base digest=${base#*@} ;;
  *)
    if [[ $made_here == sha256:* ]]; then
      pinned=$base digest=$made_here
    else
      docker pull -q "$base" >/dev/null
      pinned=$(docker image inspect --format '{{index .RepoDigests 0}}' "$base")
      digest=${pinned#*@}
    fi
    ;;
esac
[[ $digest == sha256:* ]] || { echo "the digest of $base is not known" >&2; exit 1; }
echo "base image: $pinned ($digest)"
for name in PIP_INDEX_URL PIP_NO_INDEX TORCH_INDEX_URL; do
  [ -z "${!name:-}" ] || set -- --build-arg "$name" "$@"
done
docker build -f deploy/Dockerfile -t "$image" --build-arg "BASE_IMAGE=$pinned" \
  --label "org.opencontainers.image.base.name=$base" --label "org.opencontainers.image.base.digest=$digest" "$@" .
