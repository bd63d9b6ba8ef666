#!/usr/bin/env bash
# Builds an image for a release: the base image's tag is resolved to its digest first, the build takes exactly that one,
# and the image says which it was. usage: deploy/build.sh IMAGE [BASE_IMAGE] [ARGUMENT OF docker build...]
set -euo pipefail

image=$1
base=${2:-debian:12-slim}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/.."
case $base in
  *@sha256:*) pinned=$base ;;
  *)
    docker pull -q "$base" >/dev/null
    pinned=$(docker image inspect --format '{{index .RepoDigests 0}}' "$base")
    ;;
esac
[[ $pinned == *@sha256:* ]] || { echo "the digest of $base is not known: it comes from no registry" >&2; exit 1; }
echo "base image: $pinned"
docker build -f deploy/Dockerfile -t "$image" --build-arg "BASE_IMAGE=$pinned" \
  --label "org.opencontainers.image.base.name=$base" --label "org.opencontainers.image.base.digest=${pinned#*@}" "$@" .
