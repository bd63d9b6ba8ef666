#!/usr/bin/env bash
# Tries a wheel as a user gets it: a fresh environment, an empty home, nothing of the checkout. It says its version, starts a
# pool, stores a block, reads it, and ends. With RELEASE_ENGINE=hf also: serves a model and answers a request.
# usage: check_wheel.sh INTERPRETER WHEEL
set -euo pipefail

interpreter=$1
wheel=$(realpath "$2")
work=$(mktemp -d)
state=$work/home/.mooncache
bin=$work/venv/bin
run() { (cd "$work/home" && env -i HOME="$work/home" PATH="$bin:/usr/bin:/bin" LANG=C.UTF-8 "$@"); }
finish() {
  run mooncache down --state-dir "$state" >/dev/null 2>&1 || true
  rm -rf "$work"
}
mkdir "$work/home"
trap finish EXIT

"$interpreter" -m venv "$work/venv"
extra=
[ "${RELEASE_ENGINE:-}" = hf ] && extra='[hf]'
"$bin/python" -m pip --disable-pip-version-check --no-input install "$wheel$extra" >"$work/pip.log" 2>&1 || {
  tail -n 40 "$work/pip.log"
  exit 1
}

run mooncache --version
run mooncache up --engine none --nodes 1 --capacity 64MiB --state-dir "$state" --detach >"$work/up.log" 2>&1 || {
  tail -n 40 "$work/up.log"
  exit 1
}
echo 'bytes of a block' >"$work/home/block"
run mooncache put check --file block --state-dir "$state" >/dev/null
run mooncache get check --out copy --state-dir "$state" >/dev/null
cmp "$work/home/block" "$work/home/copy"
run mooncache down --state-dir "$state" >/dev/null
if [ -n "$extra" ]; then
  run mooncache up --engine hf --prefill 0 --port 0 --state-dir "$state" --detach --json >"$work/up.json"
  run "$bin/python" - "$work/up.json" <<'ASK'
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
  run mooncache down --state-dir "$state" >/dev/null
fi
echo "$(basename "$wheel"): installed and used"
