#!/usr/bin/env bash
# Uses the mooncache that PATH finds, as a new user does: asks for its version, starts a pool, stores a block, reads it, ends the
# pool. With ENGINE hf it also serves a model and has it answer a request. Leaves nothing behind. usage: try.sh [ENGINE]
set -euo pipefail

engine=${1:-none}
work=$(mktemp -d)
state=$work/state
finish() {
  mooncache down --state-dir "$state" >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap finish EXIT
start() { # ARGUMENTS...: its log when it fails
  mooncache up --capacity 64MiB --nodes 1 --master-port 0 --state-dir "$state" --detach --json "$@" >"$work/up.json" 2>"$work/up.log" || {
    tail -n 40 "$work/up.log"
    return 1
  }
}

mooncache --version
start --engine none
echo 'bytes of a block' >"$work/block"
mooncache put check --file "$work/block" --state-dir "$state" >/dev/null
mooncache get check --out "$work/copy" --state-dir "$state" >/dev/null
cmp "$work/block" "$work/copy"
mooncache down --state-dir "$state" >/dev/null
echo "stored a block and read it"
[ "$engine" = hf ] || exit 0

start --engine hf --prefill 0 --port 0 --conductor-port 0
python - "$work/up.json" <<'ASK'
import json, pathlib, sys, urllib.request

serving = json.loads(pathlib.Path(sys.argv[1]).read_text())["serving"]
body = {"model": serving["model"], "max_tokens": 4, "messages": [{"role": "user", "content": "Who are you?"}]}
key = pathlib.Path(serving["api_key_file"]).read_text().strip()
request = urllib.request.Request(
    serving["base_url"] + "/chat/completions",
    json.dumps(body).encode(),
    {"authorization": f"Bearer {key}", "content-type": "application/json"},
)
usage = json.load(urllib.request.urlopen(request, timeout=120))["usage"]
assert usage["completion_tokens"] > 0, usage
print(f"answered with {usage['completion_tokens']} tokens")
ASK
mooncache down --state-dir "$state" >/dev/null
