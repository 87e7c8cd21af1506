# Sourced by the launchers in bin/: makes .venv once, and again when pyproject.toml changes.
# GYRE_PYTHON names the Python to use (3.11 or later). On a machine whose package index prefers CUDA builds of torch,
# point pip at PyTorch's CPU index first (PIP_EXTRA_INDEX_URL).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

gyre_setup() { # $1: the extras, for example demo or demo,dev
    local want stamp python
    want="$1 $(sha256sum "$root/pyproject.toml" | cut -d' ' -f1)"
    stamp="$venv/.gyre-$1"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && return 0
    python=${GYRE_PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        echo "gyre: Python 3.11 or later is needed; $python is $("$python" --version 2>&1 || echo not there). Set GYRE_PYTHON." >&2
        return 1
    }
    echo "gyre: setting up $venv ($1); this takes a few minutes the first time" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
        echo "gyre: cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
        return 1
    }
    # torch first and alone: a later resolver run must find the CPU build in place and leave it.
    "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --editable "$root[$1]"
    printf '%s' "$want" >"$stamp"
}
