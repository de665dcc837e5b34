"""Compiled programs: kept on disk from run to run, and made for the next pack while one trains."""

import hashlib
import os
import platform
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plora_jax.models.decoder import Runtime
    from plora_jax.models.load import Base
    from plora_jax.training.batch import Batch
    from plora_jax.training.step import PackSpec

WORTH_S = 0.5  # a program that compiled faster is not kept


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
    return cache_dir() / "programs" / "_".join([*names, _processor()])


def _processor() -> str:
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


def batch_shapes(J: int, m: int, S: int, P: int) -> "Batch":
    """Return the shapes of a micro-batch: J slots, m sequences of S positions, P of them trained."""
    import jax
    import jax.numpy as jnp

    from plora_jax.training.batch import Batch

    def ints(*size: int) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.int32)

    flags: Any = jax.ShapeDtypeStruct((J,), jnp.bool_)
    whole, picked = ints(J, m, S), ints(J, m, P)
    return Batch(whole, whole, whole, picked, picked, ints(J), flags, flags)


def compile_ahead(
    base: "Base", spec: "PackSpec", runtime: "Runtime", m: int, shapes: Sequence[tuple[int, int]]
) -> threading.Thread | None:
    """Compile a pack's step for each (S, P) beside what runs, into the cache on disk, where the pack finds it.

    Returns the thread, or None on a CPU, whose cores the running step needs, and where programs are not kept.
    """
    import jax

    if jax.default_backend() == "cpu" or not jax.config.jax_compilation_cache_dir:
        return None
    thread = threading.Thread(target=compile_all, args=(base, spec, runtime, m, shapes), daemon=True)
    thread.start()
    return thread


def compile_all(
    base: "Base", spec: "PackSpec", runtime: "Runtime", m: int, shapes: Sequence[tuple[int, int]]
) -> None:
    """Compile a pack's step for each (S, P); nothing runs."""
    import jax

    from plora_jax.training.step import empty_pack, make_train_step, weight_dtype

    step = make_train_step(base, spec, runtime)
    state = jax.eval_shape(lambda: empty_pack(base.config, spec, weight_dtype(base)))
    for S, P in shapes:
        step.lower(state, base.params, batch_shapes(spec.slots, m, S, P)).compile()  # type: ignore[attr-defined]
