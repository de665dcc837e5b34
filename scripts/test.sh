#!/usr/bin/env bash
# Set up the environment with the development tools, then check format, lint and types and run the tests.
# usage: scripts/test.sh [options of pytest]      tests that need a GPU or many minutes are left out
. "$(dirname "$0")/setup.sh" dev
say "format and lint"
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m ruff check --quiet .
say "types"
"$PYTHON" -m mypy --no-error-summary
say "tests"
if ! command -v chromedriver >/dev/null || ! command -v chromium chromium-browser google-chrome >/dev/null; then
    say "no Chromium here: the tests of the report in a browser are skipped (apt install chromium chromium-driver)"
fi
# files side by side, at most four; the first in line are those that take longest (tests/conftest.py)
exec "$PYTHON" -m pytest -m "not gpu and not long" -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
