#!/usr/bin/env bash
# A real Mooncake store for the tests, in DIRECTORY: mooncake_master (a link) and client/ (a virtual environment).
#
#     PYTHON=python3 tests/support/install_mooncake.sh DIRECTORY
#
# The master is that of the CUDA 13 wheel, the only one that was built with KV events; it needs no CUDA itself. Clients
# are of the wheel without CUDA and speak TCP. Both need libibverbs, which apt installs where we may. Does nothing when
# all is there; ends with one sentence and code 1 where it cannot be had.
set -uo pipefail

DIRECTORY=$1
CLIENT=mooncake-transfer-engine-non-cuda==0.3.13.post1
MASTER=mooncake-transfer-engine-cuda13==0.3.14
LOG=$DIRECTORY/install.log

fail() {
  echo "mooncake: $1 (log in $LOG)"
  exit 1
}

pip() {
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 --timeout 30 "${@:2}" >>"$LOG" 2>&1
}

works() {
  "$DIRECTORY/mooncake_master" --version >>"$LOG" 2>&1 &&
    "$DIRECTORY/client/bin/python" -c 'import mooncake.store' >>"$LOG" 2>&1
}

mkdir -p "$DIRECTORY"
if [ -e "$DIRECTORY/mooncake_master" ] && works; then
  exit 0
fi
: >"$LOG"

if ! ldconfig -p | grep -q 'libibverbs\.so\.1'; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    fail "libibverbs.so.1 is missing, and only root can install it (apt-get install libibverbs1 ibverbs-providers)"
  fi
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1 ibverbs-providers; } >>"$LOG" 2>&1 ||
    fail "libibverbs1 could not be installed"
fi

for part in client master; do
  "${PYTHON:-python3}" -m venv "$DIRECTORY/$part" >>"$LOG" 2>&1 || fail "no virtual environment"
done
pip "$DIRECTORY/client" "$CLIENT" || fail "$CLIENT could not be installed"
pip "$DIRECTORY/master" --no-deps "$MASTER" || fail "$MASTER could not be installed"
binary=$(find "$DIRECTORY/master" -path '*/mooncake/mooncake_master' -type f | head -n 1)
[ -n "$binary" ] || fail "$MASTER has no mooncake_master"
ln -sfn "$(realpath "$binary")" "$DIRECTORY/mooncake_master"
works || fail "the store does not start"
