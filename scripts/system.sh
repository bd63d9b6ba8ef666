#!/usr/bin/env bash
# What this machine must have before pip can do the rest. Installs Debian packages when run as root,
# otherwise names them in one line. Needed things missing: exit 1. Optional ones missing: one line each,
# saying what is skipped because of it.
#
#   system.sh up       compiler and Python for running
#   system.sh test     and what the tests make use of
#   system.sh python   prints the interpreter that .venv is made from
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin # where ldconfig and etcd are for those who are not root

have() { command -v "$1" >/dev/null 2>&1; }
header() { echo "#include <$1>" | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; }
library() { "${CXX:-g++}" -x c++ - -o /dev/null "-l$1" >/dev/null 2>&1 <<<'int main() {}'; }

# Python 3.11 to 3.13 with venv and headers; $PYTHON first, then whatever PATH has.
usable_python() {
  "$1" - >/dev/null 2>&1 <<'PROBE'
import ensurepip, pathlib, sys, sysconfig, venv
assert (3, 11) <= sys.version_info[:2] <= (3, 13)
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
PROBE
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    if have "$candidate" && usable_python "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

fuzzing_clang() {
  local candidate
  for candidate in clang++ clang++-{20,19,18,17,16,15,14}; do
    if have "$candidate" && "$candidate" -fsanitize=fuzzer -x c++ - -o /dev/null >/dev/null 2>&1 \
      <<<'#include <cstddef>
extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, size_t) { return 0; }'; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

required_packages() {
  have "${CXX:-g++}" || echo g++
  find_python >/dev/null || echo python3-venv python3-dev
}

optional_packages() {
  have ccache || echo ccache
  { header gtest/gtest.h && library gtest; } || echo libgtest-dev
  fuzzing_clang >/dev/null || echo clang-14 libclang-rt-14-dev
  have etcd || echo etcd-server
  header infiniband/verbs.h || echo libibverbs-dev
  compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || have initdb || echo postgresql
  have prometheus || echo prometheus
  have chromium || echo chromium
  { [ "$(uname -m)" != x86_64 ] || have qemu-system-x86_64; } || echo qemu-system-x86
}

say_what_is_missing() {
  local have_gtest=yes
  { header gtest/gtest.h && library gtest; } || have_gtest=
  [ "$have_gtest" ] || echo "optional: GoogleTest (libgtest-dev) not found: native unit tests are skipped"
  fuzzing_clang >/dev/null || echo "optional: clang with libFuzzer (clang-14 libclang-rt-14-dev) not found: the fuzz run is skipped"
  have etcd || echo "optional: etcd (etcd-server) not found: tests against a real etcd are skipped"
  docker info >/dev/null 2>&1 || echo "optional: no Docker engine answers (docker.io docker-compose): the test of the Compose file is skipped"
  compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || have initdb || echo "optional: PostgreSQL (postgresql) not found: tests of accounts in a database are skipped"
  have prometheus || echo "optional: Prometheus (prometheus) not found: dashboard queries are checked by name only"
  have chromium || echo "optional: Chromium (chromium) not found: the console's pages are not opened"
  have ccache || echo "optional: ccache not found: rebuilding takes longer"
  say_what_hardware_lacks
}

say_what_hardware_lacks() {
  ldconfig -p 2>/dev/null | grep -q 'libssl\.so\.3' ||
    echo "optional: OpenSSL 3 (libssl3) not found: TLS on the data plane reports itself unavailable; gRPC brings its own"
  header infiniband/verbs.h || echo "optional: verbs headers (libibverbs-dev) not found: our declarations of verbs are not compared with them"
  have qemu-system-x86_64 || echo "optional: qemu (qemu-system-x86) not found: tests on real RDMA verbs are skipped"
  header liburing.h || echo "optional: liburing (liburing-dev) not found: no part of this version needs it"
}

install() {
  [ $# -gt 0 ] || return 0
  if [ "$(id -u)" -eq 0 ] && have apt-get; then
    echo "installing Debian packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null || true
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null && return 0
    echo "apt-get could not install: $*"
    return 1
  fi
  return 1
}

case "${1:-}" in
  python) find_python || { echo "no Python 3.11 to 3.13 with venv and headers found" >&2; exit 1; } ;;
  clang) fuzzing_clang ;;
  up | test)
    read -r -a wanted <<<"$(required_packages | tr '\n' ' ')"
    if [ ${#wanted[@]} -gt 0 ] && ! install "${wanted[@]}"; then
      echo "needed first, as root: apt-get install ${wanted[*]}" >&2
      exit 1
    fi
    if [ "$1" = test ]; then
      read -r -a wanted <<<"$(optional_packages | tr '\n' ' ')"
      install "${wanted[@]}" || echo "for the optional parts, as root: apt-get install ${wanted[*]}"
      say_what_is_missing
    fi
    ;;
  *) echo "usage: system.sh up|test|python|clang" >&2; exit 2 ;;
esac
