#!/usr/bin/env bash
# NIXL for the tests into the environment of PYTHON. usage: install_nixl.sh PYTHON
#
# Only the library itself: its requirements are PyTorch with CUDA in two versions, gigabytes that nothing of it needs on
# a machine without a GPU when any PyTorch is there. The extra [nixl] is the whole. Never fails: without it the tests
# over the real library skip and say so, those over the fake one run.
set -euo pipefail

python=$1
pip=("$python" -m pip --disable-pip-version-check --no-input install -q --no-deps --require-hashes)

"$python" -c 'import nixl._api' >/dev/null 2>&1 && exit 0
if ! "$python" -c 'import torch' >/dev/null 2>&1; then
  echo "NIXL: left out, because it needs PyTorch, which is not here"
elif ! "${pip[@]}" -r requirements/nixl.txt >/dev/null 2>&1; then
  echo "NIXL: left out, because its wheels could not be installed"
elif ! "$python" -c 'import nixl._api' 2>/dev/null; then
  echo "NIXL: installed, but it cannot be imported: $("$python" -c 'import nixl._api' 2>&1 | tail -n 1)"
fi
