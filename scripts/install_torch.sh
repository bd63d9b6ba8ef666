#!/usr/bin/env bash
# PyTorch into the environment of PYTHON. usage: install_torch.sh PYTHON
#
# Where no NVIDIA GPU answers, the build without CUDA, which is smaller by gigabytes: from PyTorch's own index where that
# can be reached, alone and without looking anywhere else, so that no index can put another package in its place. What
# it needs is in requirements/*.txt. Elsewhere what pip finds under this version.
# Its version is in requirements/torch.txt, and why there is no hash.
set -euo pipefail

python=$1
VERSION=$(cd "$(dirname "$0")/../requirements" && pwd)/torch.txt
CPU_INDEX=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
pip=("$python" -m pip --disable-pip-version-check --no-input install -q)

installed() {
  "$python" - "$VERSION" >/dev/null 2>&1 <<'PROBE'
import importlib.metadata, pathlib, sys
assert "torch==" + importlib.metadata.version("torch").split("+")[0] in pathlib.Path(sys.argv[1]).read_text().split()
PROBE
}

reachable() {
  "$python" - "$CPU_INDEX" >/dev/null 2>&1 <<'PROBE'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).close()
PROBE
}

installed && exit 0
exec 2> >(grep -v 'is ignored: it is neither' >&2) # an index of this machine's pip configuration without the package
if [ "${PIP_NO_INDEX:-0}" = 1 ]; then
  "${pip[@]}" --no-deps -r "$VERSION"
elif ! { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1 && reachable; then
  "${pip[@]}" --no-deps --index-url "$CPU_INDEX" -r "$VERSION"
else
  "${pip[@]}" -r "$VERSION"
fi
