#!/usr/bin/env bash
# Set up the environment and run a complete LoRA sweep on a small real model, on the CPU: about three minutes on two free cores, more on busy ones.
# usage: scripts/quickstart.sh [options of 'plora quickstart']
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # for who calls it by 'sh'
here="$PWD"
# no extra; without an argument it would take this script's own for one
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh" ""
cd "$here" # what the options name is relative to it
exec "$PYTHON" -m plora_jax quickstart "$@"
