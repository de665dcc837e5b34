"""Steps kept whole: found again without tracing, by a name that tells all they are made from, and equal in bits."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.bench.step import random_batch
from plora_jax.cli import main
from plora_jax.data.shapes import Shape
from plora_jax.jobs import Job
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import abstract_base, load_base
from plora_jax.training import compiled, kept
from plora_jax.training.kept import KeptStep
from plora_jax.training.step import init_pack, make_train_step, pack_spec
from tests import tiny
from tests.test_compiled import cache, caching  # noqa: F401  a fixture

SITES = ("q_proj", "down_proj")  # each is a cost to compile
JOBS = [
    Job(rank=rank, batch_size=2, learning_rate=rate, targets=SITES) for rank, rate in ((3, 0.01), (4, 0.1))
]
RUNTIME = Runtime(segments=False)
AT = (2, 8, 8)  # m, S, P


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model = tiny.write_model(tmp_path_factory.mktemp("kept") / "model", num_hidden_layers=1)
    return load_base(str(model), random_weights=True, precision="fp32")


@pytest.fixture
def keeps(cache):  # noqa: F811
    """Keep steps in an empty directory, and return the directory."""
    kept._found.clear()
    compiled.keep_programs()
    yield kept.folder()
    kept._found.clear()


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    """Keep the step once; give the folder of its programs, and what training by it came to."""
    with caching(tmp_path_factory.mktemp("made") / "cache"):
        forget()
        compiled.keep_programs()
        want = train(base, kept_step(base))
        return kept.folder().parent, want


@pytest.fixture
def kept_before(made, keeps):
    """Be a process that finds the step kept; give its file, and what training by it came to."""
    shutil.copytree(made[0], keeps.parent, dirs_exist_ok=True)
    forget()
    (file,) = keeps.iterdir()
    return file, made[1]


@pytest.fixture
def traced():
    """List the functions that JAX traces from here on."""
    found: list[str] = []

    def listen(event, *_, fun_name="", **__):
        if event == "/jax/core/compile/jaxpr_trace_duration":
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


def train(base, step, steps=3):
    """Return the state after some steps, and the last metrics, as arrays of the host."""
    state = init_pack(base, JOBS, total_steps=[steps] * 2, spec=pack_spec(base.config, JOBS, m=2))
    batch = jax.tree.map(np.asarray, random_batch(64, 2, 2, 8))
    before = state.weights
    for _ in range(steps):
        state, metrics = step(state, base.params, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))  # donated
    return jax.device_get((state, metrics))


def kept_step(base, **changes):
    return KeptStep(base, replace(pack_spec(base.config, JOBS, m=2), **changes), RUNTIME)


def forget():
    """Be as a process that has just begun."""
    kept._found.clear()
    jax.clear_caches()


def equal(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_kept_step_is_found_before_the_weights_and_is_the_same_in_every_bit(base, keeps, traced):
    want = train(base, make_train_step(base, pack_spec(base.config, JOBS, m=2), RUNTIME))
    forget()
    jax.config.update("jax_enable_compilation_cache", False)
    unkept = kept_step(base)
    assert equal(want, train(base, unkept)) and not keeps.exists()
    jax.config.update("jax_enable_compilation_cache", True)
    forget()
    for file in keeps.parent.iterdir():  # JAX's own, which would be found
        file.unlink()
    traced.clear()
    assert equal(want, train(base, kept_step(base)))
    assert "step" in traced and len(list(keeps.iterdir())) == 1
    forget()
    traced.clear()
    abstract = abstract_base(base.name, precision="fp32")
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract.params))
    kept_step(abstract).seek(2, [Shape(8, 8)])
    (found,) = kept._found.values()
    assert found.result() is not None
    (file,) = keeps.iterdir()
    os.utime(file, (1000, 1000))
    assert equal(want, train(base, kept_step(base)))
    assert "step" not in traced
    forget()
    assert kept_step(base)._seek(AT).result() and file.stat().st_mtime > 1000  # it is in use


def test_a_restored_state_goes_on_by_the_same_program(base, keeps):
    step = kept_step(base)
    spec, batch = step.spec, jax.tree.map(np.asarray, random_batch(64, 2, 2, 8))
    state = init_pack(base, JOBS, total_steps=[3] * 2, spec=spec)
    committed = jax.device_put(jax.tree.map(np.asarray, state), jax.devices()[0])
    one, _ = step(state, base.params, batch)
    two, _ = step(committed, base.params, batch)
    assert equal(jax.device_get(one), jax.device_get(two)) and len(kept._found) == 1


def test_the_name_holds_whatever_the_step_is_made_from(base, keeps, monkeypatch):
    name = kept_step(base).name(AT)
    assert kept_step(abstract_base(base.name, precision="fp32")).name(AT) == name
    others = [
        kept_step(base).name((2, 8, 4)),
        kept_step(base).name((1, 8, 8)),
        kept_step(base, slots=3).name(AT),
        kept_step(base, accumulate=True).name(AT),
        kept_step(base, optimizers=frozenset({"adamw", "sgd"})).name(AT),
        kept_step(abstract_base(base.name, dtype=jnp.bfloat16)).name(AT),
        kept_step(replace(base, config=replace(base.config, norm_eps=0.5))).name(AT),
        KeptStep(base, pack_spec(base.config, JOBS, m=2), replace(RUNTIME, recompute="layer")).name(AT),
    ]
    with jax.default_matmul_precision("highest"):
        others.append(kept_step(base).name(AT))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exclude_nondeterministic_ops")
    others.append(kept_step(base).name(AT))
    monkeypatch.undo()
    monkeypatch.setattr(kept, "_versions", lambda: [("jax", "0")])
    others.append(kept_step(base).name(AT))
    monkeypatch.undo()
    monkeypatch.setattr(kept, "_source", lambda: "another")
    others.append(kept_step(base).name(AT))
    monkeypatch.undo()
    assert len({name, *others}) == 1 + len(others)


def test_another_process_gives_the_same_name(base, keeps):
    code = (
        "import sys; from tests.test_kept import *\n"
        "compiled.keep_programs()\n"
        f"print(kept_step(abstract_base({base.name!r}, precision='fp32'), optimizers=frozenset(OPTIMIZERS)).name(AT))"
    ).replace("OPTIMIZERS", "('adamw', 'sgd')")
    env = {**os.environ, "PYTHONHASHSEED": "7", "JAX_ENABLE_COMPILATION_CACHE": "true"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert told == kept_step(base, optimizers=frozenset({"adamw", "sgd"})).name(AT)


def test_the_source_counts(tmp_path, monkeypatch):
    package = tmp_path / "traced_code"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tuned.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kept, "SOURCES", ("traced_code",))
    seen = {kept._source.__wrapped__()}
    (package / "tuned.json").write_text("{ }")
    seen.add(kept._source.__wrapped__())
    (package / "more.py").write_text("")
    seen.add(kept._source.__wrapped__())
    (package / "notes.md").write_text("")
    assert kept._source.__wrapped__() in seen and len(seen) == 3


@pytest.mark.parametrize("harm", ["torn", "flipped", "empty", "of another world"])
def test_a_file_that_is_not_whole_is_written_anew(base, keeps, kept_before, harm):
    file, want = kept_before
    assert kept_step(base)._seek(AT).result() is not None
    whole = file.read_bytes()
    broken = {
        "torn": whole[:-1],
        "flipped": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        "empty": b"",
        "of another world": kept.hashlib.sha256(b"pickle?").digest() + b"pickle?",
    }[harm]
    file.write_bytes(broken)
    for own in keeps.parent.glob("jit_step*"):
        own.unlink()
    forget()
    assert equal(want, train(base, kept_step(base)))
    assert file.read_bytes() != broken
    forget()
    assert kept_step(base)._seek(AT).result() is not None


@pytest.mark.parametrize("open_to_others", ["file", "folder"])
def test_what_others_may_write_is_not_run(base, keeps, kept_before, open_to_others):
    file, _ = kept_before
    assert kept_step(base)._seek(AT).result() is not None
    assert file.stat().st_mode & 0o77 == 0
    (file if open_to_others == "file" else keeps).chmod(0o777)
    forget()
    assert kept_step(base)._seek(AT).result() is None


def test_what_jax_found_in_its_own_cache_is_not_written_again(base, kept_before):
    """XLA on CPU leaves functions out of a program that it has read itself, which then fails as it runs."""
    file, want = kept_before
    file.unlink()
    forget()
    assert equal(want, train(base, kept_step(base)))
    assert not file.exists()


def test_the_oldest_files_go(keeps, base, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    keeps.mkdir()
    for age, name in enumerate(("aa", "bb", "cc")):
        (keeps / name).write_text("")
        os.utime(keeps / name, (1000 - age, 1000 - age))
    train(base, kept_step(base), 1)
    assert (keeps / "aa").exists() and len(list(keeps.iterdir())) == 2


def test_a_disk_without_room_costs_the_kept_step_alone(base, keeps, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.Path, "replace", full)
    train(base, kept_step(base), 1)
    assert list(keeps.iterdir()) == []


def test_a_run_finds_the_step_of_the_run_before(tmp_path, keeps, monkeypatch):
    """The driver's command, twice: the second has no step that could be traced, and ends with the same losses."""
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    tiny.write_weights(model)
    search, train = {"rank": [4], "learning_rate": [0.01, 0.1]}, {"batch_size": 2, "targets": [*SITES]}
    path = tiny.write_sweep(tmp_path, search=search, train=train)
    losses = []
    for name in ("one", "two"):
        forget()
        assert main(["sweep", str(path), "--out", str(tmp_path / name)]) == 0
        board = json.loads((tmp_path / name / "leaderboard.json").read_text())
        losses.append([job["loss"] for job in board["jobs"]])
        monkeypatch.setattr(kept, "make_train_step", lambda *_: None)
    assert losses[0] == losses[1] and len(list(keeps.iterdir())) == 1
