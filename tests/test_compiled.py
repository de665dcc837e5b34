"""Programs are kept on disk by version, and found again."""

import contextlib
from importlib.metadata import version

import jax
import numpy as np
import pytest

from plora_jax.bench.step import random_batch
from plora_jax.jobs import Job
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import load_base
from plora_jax.training import compiled
from plora_jax.training.step import init_pack, make_train_step, pack_spec
from tests import tiny


@contextlib.contextmanager
def caching(folder):
    """Keep programs in a directory, and put JAX's settings back."""
    from jax.experimental.compilation_cache import compilation_cache

    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_enable_compilation_cache",
    )
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLORA_CACHE", str(folder))
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
        try:
            yield folder
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


@pytest.fixture
def cache(tmp_path):
    """Keep programs in an empty directory."""
    with caching(tmp_path / "cache") as folder:
        yield folder


def test_a_step_that_was_compiled_once_is_found_by_the_next_pack(cache, tmp_path):
    folder = compiled.keep_programs()
    assert folder is not None and folder.parent == cache / "programs"
    assert f"jax-{version('jax')}_jaxlib-{version('jaxlib')}" in folder.name
    base = load_base(
        str(tiny.write_model(tmp_path / "model", num_hidden_layers=1)), random_weights=True, precision="fp32"
    )
    job, runtime, batch = Job(rank=3, batch_size=2), Runtime(segments=False), random_batch(64, 1, 2, 8)
    spec = pack_spec(base.config, [job], m=2)
    found: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: found.append(name))

    def train():
        state = init_pack(base, [job], total_steps=[3], spec=spec)
        found.clear()
        _, metrics = make_train_step(base, spec, runtime)(state, base.params, batch)
        assert np.isfinite(metrics.loss).all()

    train()
    assert "/jax/compilation_cache/cache_misses" in found
    assert any(path.name.startswith("jit_step") for path in folder.iterdir())
    jax.clear_caches()
    train()
    assert "/jax/compilation_cache/cache_hits" in found and "/jax/compilation_cache/cache_misses" not in found


def test_jax_settings_of_the_user_win(cache, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert compiled.keep_programs() is None and jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLORA_CACHE", str(tmp_path / "file"))  # no directory can be made there
    assert compiled.keep_programs() is None and jax.config.jax_compilation_cache_dir is None
