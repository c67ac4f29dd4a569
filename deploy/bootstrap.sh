#!/usr/bin/env bash
# Creates the virtual environment named by the first argument and installs Magnetar into it (editable, with the
# extras of the second one). Safe to repeat. Says plainly what the machine lacks.
set -euo pipefail

venv=${1:?usage: bootstrap.sh VENV EXTRA,...}
extras=${2:?usage: bootstrap.sh VENV EXTRA,...}
cd "$(dirname "$0")/.."

missing() {
    printf 'make setup: %s\n' "$@" >&2
    exit 1
}

# The first interpreter that runs and is new enough. A name on PATH alone proves nothing: version managers leave
# stubs for interpreters that are not installed.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

if ! [ -x "$venv/bin/python" ]; then
    python=$(find_python) || missing "Python 3.11 or newer is missing; neither python3.11 nor python3 is one." \
        "Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python@3.11)," \
        "or name one: make setup PYTHON=/path/to/python3.11"
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || missing \
        "$python lacks the venv module." \
        "Install it (Debian, Ubuntu: apt install python3-venv, or python3.11-venv for that version)."
    echo "make setup: creating $venv with $("$python" --version) ($python)"
    "$python" -m venv "$venv" || missing "$python could not create $venv; see the message above."
fi

echo "make setup: installing Magnetar and its packages into $venv (extras: $extras)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]" 2>"$log"; then
    cat "$log" >&2
    command -v cc >/dev/null || command -v gcc >/dev/null || missing \
        "a package had to be compiled and there is no C compiler (Debian, Ubuntu: apt install build-essential)."
    missing "pip could not install the packages; its message is above."
fi
