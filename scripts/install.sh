#!/usr/bin/env bash
# mooncache, editable, with the packages of requirements/LOCK.txt into the environment of PYTHON, and an engine beside it.
# usage: install.sh PYTHON LOCK, where LOCK is dev, up or base (then without an engine)
#
# The engine is vLLM; where it cannot be had, the small engine on transformers; where not even PyTorch can be had,
# none. ENGINE_STAMP (default .venv/.engine) holds which one it was, so that the next run does not try again.
# The native code compiles while pip works: pip needs one core only, and mostly the network.
set -euo pipefail

python=$1
lock=$2
here=$(dirname "$0")
stamp=${ENGINE_STAMP:-.venv/.engine}
pip=("$python" -m pip --disable-pip-version-check --no-input install -q)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

quietly() { # NAME COMMAND...: the words only when it fails
  local name=$1
  shift
  "$@" >"$work/$name.log" 2>&1 || {
    grep -v 'is ignored: it is neither' "$work/$name.log" | tail -n 100
    return 1
  }
}

engine() {
  [ -s "$stamp" ] && return 0
  local status=0
  "$here/install_vllm.sh" "$python" || status=$?
  if [ $status -eq 0 ]; then
    echo vllm >"$stamp"
  elif [ $status -eq 3 ]; then
    echo "so the small engine on Hugging Face transformers is used instead (rm $stamp to try again)"
    echo hf >"$stamp"
  else
    return $status
  fi
}

locked() { # NAME: what requirements/NAME.txt says, each file checked by its hash
  quietly "$1" "${pip[@]}" --no-deps --require-hashes -r "requirements/$1.txt"
}

PATH="$(cd "$(dirname "$python")" && pwd):$PATH"
export PATH
locked build
"$python" setup.py -q build_ext --inplace >"$work/native.log" 2>&1 &
native=$!
give_up() {
  kill "$native" 2>/dev/null || true
  echo "$1"
  exit 1
}
locked "$lock" || give_up "what requirements/$lock.txt names could not be installed; the last lines above say why"
if [ "$lock" != base ]; then
  engine || give_up "the engine could not be installed"
  if [ "$(cat "$stamp")" != vllm ] && ! quietly torch "$here/install_torch.sh" "$python"; then
    echo "PyTorch could not be installed: there will be no engine, only the pool"
    echo none >"$stamp"
  fi
fi
if ! wait "$native"; then
  tail -n 100 "$work/native.log"
  echo "the native code could not be built; the last lines above say why"
  exit 1
fi
quietly editable "${pip[@]}" --no-build-isolation --no-deps -e . -v || {
  echo "mooncache could not be built and installed; the last lines above say why"
  exit 1
}
