"""`plora doctor`: what was found on this machine, what is missing, and what to do about it."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from plora_jax.hub import hub_host, why_unreachable
from plora_jax.machine import cores, gpus, memory_bytes
from plora_jax.training.compiled import programs_dir

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "cvxpy",
    "highspy",
)
# The first initialisation of CUDA can take most of a minute; a broken driver can hang for ever.
JAX_SECONDS = 120
PROBE = """
import json, jax, pallas_kernels
from pallas_kernels.fp8 import why_not
with pallas_kernels.using("auto"):
    kernel = pallas_kernels.choose("bfloat16", 8, 1024, 4096, (4096,), (32,))
fp8 = why_not(pallas_kernels.default_device().capability)
print(json.dumps([jax.default_backend(), [d.device_kind for d in jax.devices()], kernel, fp8]))
"""


class Finding(NamedTuple):
    """Hold one line of the report; `state` is ok, note (works without it) or bad (nothing runs)."""

    name: str
    state: str
    text: str


def doctor(model: str | None = None) -> int:
    """Print what this machine has; return 0 when a sweep can run on it, 1 when something is missing."""
    from plora_jax.models.describe import describe

    described = describe(model) if model else ""  # a model that cannot be used is told before all else
    findings = [*packages(), machine(), driver(), *accelerator(), hub(), disk(), programs()]
    marks = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{marks[finding.state]}  {finding.name.ljust(width)}  {finding.text}")
    if described:
        print(f"\n{described}")
    bad = [finding.name for finding in findings if finding.state == "bad"]
    print(f"\nnot ready: {', '.join(bad)}" if bad else "\nready: plora quickstart runs a complete sweep")
    return 1 if bad else 0


def packages() -> list[Finding]:
    """Report Python, and the packages a sweep needs by version."""
    python = platform.python_version()
    right = sys.version_info >= (3, 12)
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    out = [
        Finding("python", "ok" if right else "bad", python if right else f"{python}; 3.12 or newer is needed")
    ]
    out.append(Finding("packages", "ok", ", ".join(found)))
    if missing:
        out.append(Finding("missing", "bad", f"{', '.join(missing)}; pip install plora-jax installs them"))
    if importlib.util.find_spec("ray") is None:
        out.append(
            Finding(
                "ray", "note", "not installed; only needed on a Ray cluster: pip install 'plora-jax[ray]'"
            )
        )
    return out


def machine() -> Finding:
    """Report cores and the memory that is left."""
    gib = memory_bytes() / 2**30
    few = " (quickstart needs 6)" if gib < 6 else ""
    return Finding(
        "machine", "note" if few else "ok", f"{cores()} cores, {gib:.1f} GiB of memory available{few}"
    )


def driver() -> Finding:
    """Report the GPUs and the driver, as nvidia-smi sees them."""
    found = gpus()
    if not found:
        return Finding("gpu driver", "note", "no NVIDIA GPU found (no nvidia-smi): sweeps run on the CPU")
    kinds = {f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB": 0 for gpu in found}
    for gpu in found:
        kinds[f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB"] += 1
    listed = "; ".join(f"{count} × {kind}" for kind, count in kinds.items())
    return Finding("gpu driver", "ok", f"{listed}; driver {found[0].driver}")


def accelerator() -> list[Finding]:
    """Report what JAX computes on and by which kernels, asked in another process: a broken driver may hang."""
    try:
        command = [sys.executable, "-c", PROBE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=JAX_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"no answer within {JAX_SECONDS} s; the GPU driver hangs: try JAX_PLATFORMS=cpu"
        return [Finding("jax", "bad", text)]
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return [Finding("jax", "bad", f"does not start: {lines[-1] if lines else 'no message'}")]
    backend, found, (kernel, reason), fp8 = json.loads(done.stdout.splitlines()[-1])
    kinds = ", ".join(f"{found.count(kind)} × {kind}" for kind in dict.fromkeys(found))
    out = [Finding("jax", "ok", f"computes on {backend}: {kinds}")]
    if backend == "cpu" and gpus():
        text = "there is a GPU that JAX does not use; install its CUDA build: pip install 'plora-jax[cuda]'"
        out.append(Finding("jax on gpu", "note", text))
    return [
        *out,
        Finding("kernels", "ok", f"xla in scanned layers; where they are written out, {kernel}: {reason}"),
        _fp8(backend, fp8),
    ]


def _fp8(backend: str, reason: str | None) -> Finding:
    if reason:
        return Finding("fp8 base", "note", f"not here: {reason}")
    slow = ", slowly: a CPU multiplies no fp8 numbers" if backend == "cpu" else ""
    return Finding("fp8 base", "ok", f"precision: fp8 runs here{slow}")


def hub() -> Finding:
    """Report whether the Hugging Face hub answers; never waits longer than a few seconds."""
    if reason := why_unreachable():
        return Finding("hub", "note", f"{reason}; models and data come from this machine alone")
    return Finding("hub", "ok", f"{hub_host()[0]} answers")


def programs() -> Finding:
    """Report where compiled programs are kept, and how much they take."""
    folder = programs_dir()
    if own := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Finding(
            "programs", "ok", f"compiled ones are kept where $JAX_COMPILATION_CACHE_DIR says: {own}"
        )
    size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) / 2**20
    return Finding(
        "programs", "ok", f"compiled ones are kept in {folder} ({size:.0f} MiB); $PLORA_CACHE moves it"
    )


def disk() -> Finding:
    """Report the space where runs are written by default."""
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    state = "ok" if free > 2 else "note"
    return Finding("disk", state, f"{free:.1f} GiB free in {Path.cwd()}")
