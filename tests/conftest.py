"""Settings that must stand before JAX starts its CPU device."""

import os

# Interpreted GPU kernels block one CPU worker per simulated warpgroup: with a pool of two cores they would deadlock.
os.environ.setdefault("NPROC", "16")
