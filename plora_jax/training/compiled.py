"""Compiled programs: kept on disk from run to run."""

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Options = tuple[tuple[str, bool], ...]  # of the compiler

WORTH_S = 0.01  # a program that compiled faster is not kept
PROGRAM_TOKENS = {"cpu": 4_096}  # tokens whose forward pass takes about as long as compiling one, by backend


def cache_dir() -> Path:
    """Return where downloads and compiled programs are kept: $PLORA_CACHE, else ~/.cache/plora_jax."""
    return Path(os.environ.get("PLORA_CACHE") or Path.home() / ".cache" / "plora_jax")


def programs_dir() -> Path:
    """Return where this version's programs are kept: one directory for each set of versions and kind of processor.

    JAX names a program by all that it is compiled from and for, but for the host's own processor.
    """
    names = []
    for package in ("plora-jax", "jax", "jaxlib"):
        try:
            names.append(f"{package}-{version(package)}")
        except PackageNotFoundError:
            names.append(package)
    return cache_dir() / "programs" / "_".join([*names, processor()])


def processor() -> str:
    """Name the kind of processor of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def keep_programs() -> Path | None:
    """Let JAX keep and find compiled programs in `programs_dir`; return it, or None where JAX has been told otherwise.

    JAX's own settings win: $JAX_COMPILATION_CACHE_DIR, or JAX_ENABLE_COMPILATION_CACHE=false. A directory that cannot
    be written is no error: programs are then compiled every time.
    """
    import jax

    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return None
    folder = programs_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_S)
    return folder


def program_tokens() -> int:
    """Return how many tokens' padding is worth a compiled program of its own on this backend."""
    import jax

    return PROGRAM_TOKENS.get(jax.default_backend(), 262_144)


def quick_options() -> Options:
    """Return the options of a program that compiles fast on a GPU: Triton's products are not tried; none elsewhere.

    Each of them is timed. On an H200 a step of written-out layers compiles in 22 s instead of 113, one of fp8 products
    in 36 s where it took minutes, and they run as fast (docs/benchmarks.md).
    """
    import jax

    return (("xla_gpu_enable_triton_gemm", False),) if jax.default_backend() == "gpu" else ()
