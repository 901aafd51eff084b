#!/usr/bin/env bash
# Builds one environment from its lock file, only when the lock has changed since it was built.
# Usage: build_env.sh PYTHON FOLDER LOCK CHECK...   (CHECK: a Python command that proves the environment fit)
set -euo pipefail

python=$1 folder=$2 lock=$3
shift 3

fail() {
    echo "error: $1" >&2
    exit 1
}

wanted=$(sha256sum "$lock" | cut -d' ' -f1)
if [ -x "$folder/bin/python" ] && [ "$(cat "$folder/built-from.sha256" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

command -v "$python" >/dev/null ||
    fail "$python is not on the PATH: install Python 3.11 (Debian, Ubuntu: python3.11 and python3.11-venv; or pyenv install 3.11), or name it: make PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "$python is $("$python" -V 2>&1), and Reverb's last release has no wheel after Python 3.11: install 3.11, or name it: make PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python can't make virtual environments: install its venv module (Debian, Ubuntu: python3.11-venv)"

began=$(date +%s)
echo "$folder: installing $(grep -c == "$lock") packages from $lock; this takes a few minutes, once"
rm -rf "$folder"
"$python" -m venv "$folder"
# --no-deps: the lock holds all of them, so nothing is resolved, and every file is checked against its hash.
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$lock" ||
    fail "pip could not install $lock (its reason is above); run make again to retry"
"$folder/bin/python" "$@" || fail "$folder was installed but does not work (the reason is above)"
echo "$wanted" >"$folder/built-from.sha256"
echo "$folder: ready after $(($(date +%s) - began)) s"
