#!/usr/bin/env bash
# Runs tests that time real processes: timed.sh PYTHON PYTEST-ARGUMENT...
# Up to five that fail run once more, one after the other with nothing beside them; those that pass only then are named
# at the end ("passed only by itself"). Exit code: 0 when every test passed at least once, else pytest's.
set -uo pipefail
python=$1
shift
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT

"$python" -m pytest -o cache_dir="$kept" "$@"
code=$?
failed="$kept/v/cache/lastfailed"
[ "$code" = 1 ] && [ -s "$failed" ] || exit "$code"
names=$("$python" -c 'import json, sys; print("\n".join(json.load(open(sys.argv[1], encoding="utf-8"))))' "$failed")
if [ "$(wc -l <<<"$names")" -gt 5 ]; then
  exit "$code"
fi
printf '\n%s failed among others; once more by themselves:\n%s\n' "$(wc -l <<<"$names")" "$names"
"$python" -m pytest -o cache_dir="$kept" --last-failed --last-failed-no-failures none -p no:xdist -q tests || exit $?
printf '\npassed only by itself, and so not to be relied on:\n%s\n' "$names"
