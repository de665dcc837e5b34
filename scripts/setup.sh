# Sourced by the other scripts: finds Python >= 3.12, makes .venv and installs the locked packages into it.
# usage: . scripts/setup.sh [EXTRA]     afterwards $PYTHON is the environment's interpreter
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
extra="${1:-}"
venv="${PLORA_VENV:-$PWD/.venv}"
PYTHON="$venv/bin/python"

say() { printf '\033[1m[plora]\033[0m %s\n' "$*"; }

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# An interpreter that is on PATH may be a shim that does not start, so each candidate is run before it is taken.
find_python() {
    local candidate
    for candidate in "${PLORA_PYTHON:-}" python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[2-9]*/bin/python /opt/python*/bin/python3 /usr/local/bin/python3.1[2-9]; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# one set-up at a time, where there is flock
if command -v flock >/dev/null 2>&1; then
    exec 9<.
    flock -n 9 || { say "waiting for another set-up of this clone" && flock 9; } || true
fi

stamp="$venv/.plora-installed"
[ -w . ] || [ -e "$stamp" ] || fail "$PWD cannot be written to, and the package is installed from there: use a copy that can be."
if ! { [ -x "$PYTHON" ] && new_enough "$PYTHON"; }; then
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv is no virtual environment, and it is not empty: remove it, or name another in PLORA_VENV, then run this again."
    fi
    if found=$(find_python); then
        say "making $venv with $found ($("$found" -V))"
        "$found" -m venv --clear "$venv" || fail "$venv could not be made; PLORA_VENV names another place."
    elif command -v uv >/dev/null 2>&1 && uv venv --quiet --clear --seed --python '>=3.12' "$venv"; then
        say "making $venv with $("$PYTHON" -V) through uv"
    else
        fail "plora_jax needs Python 3.12 or newer (with its venv module), and none was found on PATH, among pyenv's versions or through uv." \
            "Install one, for instance with 'apt install python3.12-venv', 'pyenv install 3.12' or 'pip install uv', or name it in PLORA_PYTHON, then run this again."
    fi
fi

# The stamp names what is installed and from where, so that a second run starts at once, and a changed lock or a clone
# that was moved installs again.
wanted="$(cat pyproject.toml scripts/constraints.txt | cksum) $PWD $extra"
found="$(cat "$stamp" 2>/dev/null || true)"
if [ "$found" != "$wanted" ] && { [ -n "$extra" ] || [ "${found#"$wanted"}" = "$found" ]; }; then
    say "installing the packages locked in scripts/constraints.txt${extra:+, with the extra '$extra'}"
    # pip is half there where making the environment was killed
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip --upgrade >/dev/null
    { "$PYTHON" -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt uv &&
        "$PYTHON" -m uv pip install --quiet --python "$PYTHON" -c scripts/constraints.txt -e ".${extra:+[$extra]}"; } ||
        fail "The packages could not be installed; the lines above say why." \
            "They come from the Python package index, or from where PIP_INDEX_URL and UV_INDEX_URL say: check that it is reached, then run this again."
    printf '%s' "$wanted" >"$stamp"
else
    say "using $venv as it is"
fi
exec 9<&-
