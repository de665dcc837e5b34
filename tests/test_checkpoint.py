"""Checkpoints come back bit for bit or not at all: after damage, kills, a full disk and one that cannot be written."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from plora_jax.engine import faults
from plora_jax.engine.checkpoint import Checkpoints
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.models.config import config_from_hf
from plora_jax.training.step import PackSpec, empty_pack, fresh_slot, make_load_slot
from tests import tiny

STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array([3, 4], np.int32)}


@pytest.fixture
def checkpoints(tmp_path):
    """Give a pack's checkpoints in a new directory, closed at the end."""
    made = Checkpoints(tmp_path / "pack")
    yield made
    with contextlib.suppress(OSError):
        made.close()


def names(checkpoints):
    return sorted(path.name for path in checkpoints.directory.iterdir())


def bits(tree):
    return [
        (np.asarray(x).dtype, np.asarray(x).shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)
    ]


def test_every_dtype_comes_back_bit_for_bit(checkpoints):
    nans = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1], np.uint32)
    tree = {
        "float32": nans.view(np.float32),  # quiet and signalling NaN with payloads, -0, a denormal
        "float64": np.array([0x7FF8000000000001, 1 << 63, 1], np.uint64).view(np.float64),
        "bfloat16": np.array([0x7FC1, 0xFF81, 0x8000, 1], np.uint16).view(ml_dtypes.bfloat16),
        "int32": np.array([-(2**31), 2**31 - 1], np.int32),
        "uint32": np.array(2**32 - 1, np.uint32),
        "bool": np.array([[True], [False]]),
        "scalar": np.array(True),
        "empty": np.zeros((0, 3), np.float32),
        "zero": np.zeros((2, 3), ml_dtypes.bfloat16),
        "minus zero": np.full((4, 4), -0.0, np.float32),
        "a/b.c['d']": (np.float32(0.1), np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    }
    meta = {
        "cursor": [1, 2],
        "lr": 0.1,
        "nan": float("nan"),
        "name": "ö",
        "deep": {"none": None, "yes": True},
    }
    checkpoints.save(7, tree, meta)
    step, back, told = checkpoints.restore(tree)
    assert step == 7 and bits(back) == bits(tree)
    assert told.pop("nan") != meta.pop("nan") and told == meta


def test_the_state_of_a_pack_comes_back_where_it_was(checkpoints):
    config = config_from_hf(tiny.CONFIG)
    spec = PackSpec(2, 8, ("q_proj", "down_proj"), frozenset({"adamw", "sgd"}))
    state = make_load_slot(spec)(
        empty_pack(config, spec), 1, *fresh_slot(config, spec, Job(rank=4, targets=("q_proj",)), 9)
    )
    checkpoints.save(1, state, {})
    _, back, _ = checkpoints.restore(state)
    assert jax.tree.structure(back) == jax.tree.structure(state) and bits(back) == bits(state)
    calls = jax.jit(lambda s: jax.tree.map(jnp.add, s, s))
    calls(state), calls(back)
    assert calls._cache_size() == 1  # the restored state is no new program
    second = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=second), state)
    assert jax.tree.leaves(checkpoints.restore(like)[1])[0].sharding == second


def test_what_is_saved_is_what_was_there_when_save_was_called(checkpoints):
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    state, host, meta = jnp.zeros(100_000), np.zeros(100_000), {"seen": [1]}
    written = threading.Event()
    checkpoints._thread.submit(written.wait)  # the disk is slow
    checkpoints.save(1, {"x": state, "h": host}, meta)
    for _ in range(20):
        state = donating(state)
    host += 1
    meta["seen"].append(2)
    written.set()
    _, back, told = checkpoints.restore({"x": state, "h": host})
    assert not back["x"].any() and not back["h"].any() and told == {"seen": [1]}


def test_the_last_are_kept(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / "pack", keep=3)) as checkpoints:
        for step in range(5):
            checkpoints.save(step, {"x": np.full(2, step)}, {"step": step})
        checkpoints.wait()
        assert names(checkpoints) == ["000003-2", "000004-3", "000005-4"]
        step, back, meta = checkpoints.restore({"x": np.zeros(2, int)})
        assert step == 4 and back["x"].tolist() == [4, 4] and meta == {"step": 4}
        checkpoints.save(2, {"x": np.full(2, -1)}, {})  # a pack that starts over is newer, whatever its step
        assert checkpoints.restore({"x": np.zeros(2, int)})[0] == 2
        checkpoints.delete()
        assert not checkpoints.directory.exists() and checkpoints.restore(STATE) is None
        checkpoints.save(0, STATE, {})
        assert checkpoints.restore(STATE)[0] == 0


def test_rubbish_is_no_checkpoint(checkpoints):
    assert checkpoints.restore(STATE) is None
    for step in (1, 2):
        checkpoints.save(step, STATE, {})
    checkpoints.wait()
    there = checkpoints.directory
    shutil.copytree(there / "000002-2", there / "000003-3.partial")
    shutil.copytree(there / "000002-2", there / "000003-3.partial.orbax-checkpoint-tmp")
    shutil.copytree(there / "000001-1", there / "000000-0.deleted")
    (there / "000009-9").write_text("a file")
    (there / "000008-8").mkdir()
    (there / "000007-7").symlink_to("nowhere")
    (there / "note.txt").write_text("mine")
    assert checkpoints.restore(STATE)[0] == 2
    assert names(checkpoints) == ["000001-1", "000002-2", "000007-7", "000009-9", "note.txt"]
    checkpoints.save(3, STATE, {})
    assert checkpoints.restore(STATE)[0] == 3


def test_nothing_but_zeros(checkpoints):
    checkpoints.save(1, {"x": np.zeros((2, 2), np.int32), "y": np.zeros(0)}, {})
    assert (
        checkpoints.restore({"x": np.ones((2, 2), np.int32), "y": np.zeros(0)})[1]["x"].tolist()
        == [[0, 0]] * 2
    )


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "metadata", "empty"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(checkpoints, damage, caplog):
    for step in (1, 2):
        checkpoints.save(step, {"w": np.arange(5000.0) + step}, {})
    checkpoints.wait()
    newest = checkpoints.directory / "000002-2"
    data = max(newest.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    if damage == "bit":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage == "cut":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "gone":
        data.unlink()
    else:
        (newest / "_CHECKPOINT_METADATA").write_text("" if damage == "empty" else '{"item_handlers": 3}')
    step, back, _ = checkpoints.restore({"w": np.zeros(5000)})
    assert step == 1 and back["w"][0] == 1 and names(checkpoints) == ["000001-1"]
    assert "000002-2 is damaged" in caplog.text


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({**STATE, "w": np.zeros((3, 2), np.float32)}, r"w is float32\[2, 3\] there, float32\[3, 2\] here"),
        ({**STATE, "w": np.zeros((2, 3), np.int32)}, r"w is float32\[2, 3\] there, int32\[2, 3\] here"),
        ({"w": STATE["w"]}, r"step is int32\[2\] there, absent here"),
        ({**STATE, "v": {"q": np.zeros(1)}}, r"v/q is absent there, float64\[1\] here"),
    ],
)
def test_another_packs_arrays_are_an_error_that_names_them(checkpoints, like, message):
    checkpoints.save(1, STATE, {})
    with pytest.raises(UserError, match=message):
        checkpoints.restore(like)
    assert checkpoints.restore(STATE)[0] == 1


def test_what_json_cannot_hold_is_refused_at_once(checkpoints):
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, STATE, {"x": np.zeros(2)})


def test_a_failed_save_is_told_at_the_next_one_and_leaves_the_others(checkpoints, monkeypatch):
    checkpoints.save(1, STATE, {})
    checkpoints.wait()
    faults.arm("checkpoint-commit=enospc")
    checkpoints.save(2, STATE, {})
    with pytest.raises(OSError) as told:
        checkpoints.save(3, STATE, {})
    assert told.value.errno == errno.ENOSPC and told.value.filename.endswith("pack/000002-2")
    assert names(checkpoints) == ["000001-1"] and checkpoints.restore(STATE)[0] == 1
    checkpoints.save(3, STATE, {})  # told once
    assert checkpoints.restore(STATE)[0] == 3
    faults.arm("")


def test_everything_is_flushed_before_the_name_that_makes_it_whole(checkpoints, monkeypatch):
    flushed, flush = {}, os.fsync

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed[path] = path.stat().st_size if path.is_file() else names(checkpoints)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoints.save(1, STATE, {})
    checkpoints.wait()
    final = checkpoints.directory / "000001-1"
    partial = final.with_name("000001-1.partial")
    everything = {partial} | {partial / path.relative_to(final) for path in final.rglob("*")}
    assert everything <= flushed.keys() and flushed[partial] == ["000001-1.partial"]
    sizes = {path: (final / path.relative_to(partial)).stat().st_size for path in everything}
    assert all(flushed[path] == size for path, size in sizes.items() if isinstance(flushed[path], int))
    assert flushed[checkpoints.directory] == ["000001-1"]


@contextlib.contextmanager
def mounted(directory: Path, options: str):
    """Mount a small tmpfs for the block."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_full_disk_and_read_only_file_system(tmp_path):
    with (
        mounted(tmp_path / "small", "size=3m"),
        contextlib.closing(Checkpoints(tmp_path / "small/pack")) as c,
    ):
        big = {"x": np.random.default_rng(0).standard_normal(250_000).astype(np.float32)}  # 1 MB
        c.save(1, big, {})
        c.wait()
        (tmp_path / "small/filler").write_bytes(bytes(1_500_000))
        c.save(2, big, {})
        with pytest.raises(OSError, match="No space left") as told:
            c.wait()
        assert told.value.errno == errno.ENOSPC and str(c.directory) in told.value.filename
        assert names(c) == ["000001-1"]  # and what was half-written gave its room back
        assert bits(c.restore(big)[1]) == bits(big)
        (tmp_path / "small/filler").unlink()
        c.save(3, big, {})
        assert c.restore(big)[0] == 3
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "small")], check=True)
        c.save(4, big, {})
        with pytest.raises(OSError, match="Read-only") as told:
            c.wait()
        assert told.value.errno == errno.EROFS and bits(c.restore(big)[1]) == bits(big)


KILLER = """
import os, sys
import numpy as np
from plora_jax.engine import faults
from plora_jax.engine.checkpoint import Checkpoints

def child(work):
    pid = os.fork()  # JAX's devices are not in use yet, so that a fork is a process like any other
    if pid == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

like = {"x": np.zeros(200_000, np.float32), "n": np.zeros((), np.int32)}
seen = set()
for trial, spec in enumerate(sys.argv[2:]):
    directory = f"{sys.argv[1]}/{trial}"

    def write():
        faults.arm(spec)
        checkpoints = Checkpoints(directory)
        for step in range(1, 6):
            arrays = {"x": np.full(200_000, step, np.float32), "n": np.array(step, np.int32)}
            checkpoints.save(step, arrays, {"n": step})
        checkpoints.close()

    assert child(write) == -9, spec

    def read():
        checkpoints = Checkpoints(directory)
        step, arrays, meta = checkpoints.restore(like)
        assert meta == {"n": step} and arrays["n"] == step and (arrays["x"] == step).all()
        assert all(name.count("-") == 1 for name in os.listdir(directory)), os.listdir(directory)
        print(spec, step, flush=True)
        checkpoints.save(6, like, {})
        checkpoints.close()

    assert child(read) == 0, spec
"""


def test_kill_9_at_every_point_of_a_save(tmp_path):
    points = {
        "checkpoint": 3,
        "checkpoint-sync": 3,
        "checkpoint-commit": 3,
        "checkpoint-prune": 4,
    }  # newest after
    specs = {f"{point}:4=kill": step for point, step in points.items()}
    specs |= {
        f"checkpoint:4=kill+{ms}": None for ms in (2, 5, 10, 15, 20, 30)
    }  # somewhere in Orbax's writing
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), *specs], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    got = dict(line.split() for line in done.stdout.splitlines())
    assert got.keys() == specs.keys()
    assert all(
        int(got[spec]) == step if step else int(got[spec]) in (3, 4, 5) for spec, step in specs.items()
    ), got
