"""How programs are compiled, and where they are kept, while some tests run."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from plora_jax.training import compiled, kept

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@contextlib.contextmanager
def kept_in(folder: Path):
    """Keep programs of this process and of those that it starts in a folder, and put the settings back."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    values = dict(zip(SETTINGS, (str(folder), compiled.WORTH_S, True), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        kept._found.clear()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    kept._found.clear()


def with_newer_emitters(*code: str) -> None:
    """Run lines of code in a process whose fusions are emitted as users' are: the older emitters round them otherwise
    in a loop."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
