#!/usr/bin/env bash
# Set up the environment and run a complete LoRA sweep on a small real model, on the CPU, in under ten minutes.
# usage: scripts/quickstart.sh [options of 'plora quickstart']
. "$(dirname "$0")/setup.sh" "" # no extra; without an argument it would take this script's own for one
exec "$venv/bin/plora" quickstart "$@"
