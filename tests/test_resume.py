"""A sweep that is interrupted or refused: what is said, what stays, and that going on ends with the same bits."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from plora_jax.cli import main
from plora_jax.config.yamlfile import dump_yaml, parse_yaml
from plora_jax.engine import faults
from scripts.kill_test import differences, results
from tests import tiny

ROWS = [  # of one length: one program
    {"prompt": f"what is {a} ?", "completion": f" {b}"}
    for a in ("one", "two", "three")
    for b in ("red", "green", "blue")
]


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory):
    """Write a sweep of four jobs of different lengths, with evaluations on the way."""
    root = tmp_path_factory.mktemp("resume")
    tiny.write_model(root / "model")
    tiny.write_weights(root / "model")
    tiny.write_rows(root / "train.jsonl", ROWS)
    tiny.write_rows(root / "eval.jsonl", ROWS[::4])
    jobs = [{"rank": 4, "learning_rate": 0.01 * (1 + i), "max_steps": 12 + 6 * i} for i in range(4)]
    return tiny.write_sweep(
        root,
        data={"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16},
        search={"jobs": jobs},
        train={"batch_size": 3, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
        eval={"every_steps": 5},
    )


@pytest.fixture(scope="module")
def undisturbed(sweep_file):
    """Run the sweep once, and tell what it came to."""
    out = sweep_file.parent / "undisturbed"
    assert main(["sweep", str(sweep_file), "--out", str(out)]) == 0
    return out, results(out)


@pytest.fixture(autouse=True)
def disarmed():
    """Leave no fault behind."""
    yield
    faults.arm("")


def sweep(sweep_file, out, *options):
    arguments = ["sweep", str(sweep_file), "--out", str(out), "--checkpoint-every", "0.05", *options]
    return main(arguments)


def test_sigterm_ends_with_a_checkpoint_and_resumes_to_the_same_bits(
    sweep_file, undisturbed, tmp_path, capsys
):
    out = tmp_path / "run"
    faults.arm("step:20=term")
    assert sweep(sweep_file, out, "--checkpoint-every", "1000") == 143
    assert "terminated; add --resume to go on" in capsys.readouterr().err
    saved = [path.name for path in out.glob("checkpoints/*/*/*")]
    assert saved == ["000001-20"]
    finished = {path: path.read_bytes() for path in out.glob("jobs/*/job.json")}
    assert len(finished) == 1 and not (out / "leaderboard.json").exists()
    faults.arm("step:1=term")
    assert sweep(sweep_file, out, "--resume") == 143  # again, after one step
    faults.arm("")
    assert sweep(sweep_file, out, "--resume") == 0
    assert differences(undisturbed[1], results(out)) == []
    assert {path: path.read_bytes() for path in finished} == finished
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["micro_step"] for event in events if event["event"] == "restored"] == [20, 21]


@contextlib.contextmanager
def once_there(pattern: Path, act):
    """Call `act` in another thread as soon as a file of that pattern exists."""
    over = threading.Event()

    def watch():
        while not over.is_set():
            if any(pattern.parent.parent.glob(f"{pattern.parent.name}/{pattern.name}")):
                act()
                return
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 3 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError), open(directory / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def whole(out: Path, want: dict) -> None:
    """Check that the jobs that had finished are as they were."""
    records = list(out.glob("jobs/*/job.json"))
    assert records
    for path in records:
        for file in (path, *(path.parent / "adapter").iterdir()):
            assert file.read_bytes() == want[str(file.relative_to(out))]


# Orbax closes its event loop at the first write that fails, and the others still report to it: its own affair
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_runs_full(sweep_file, undisturbed, small_disk, capsys):
    out = small_disk / "run"
    with once_there(out / "jobs/*/job.json", lambda: fill(small_disk)):
        assert sweep(sweep_file, out) == 1
    said = capsys.readouterr().err
    assert f"plora sweep: {out}/" in said and ": No space left on device; add --resume to go on" in said
    assert "Traceback" not in said
    whole(out, undisturbed[1])
    (small_disk / "filler").unlink()
    assert sweep(sweep_file, out, "--resume") == 0
    assert differences(undisturbed[1], results(out)) == []


def test_a_file_system_that_became_read_only(sweep_file, undisturbed, small_disk, tmp_path, capsys):
    faults.arm("step:20=term")
    assert sweep(sweep_file, tmp_path / "run") == 143
    out = small_disk / "run"
    shutil.copytree(tmp_path / "run", out, symlinks=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    capsys.readouterr()
    assert sweep(sweep_file, out, "--resume") == 1
    assert f"{out}/journal.jsonl: Read-only file system; add --resume to go on" in capsys.readouterr().err
    whole(out, undisturbed[1])
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert sweep(sweep_file, out, "--resume") == 0
    assert differences(undisturbed[1], results(out)) == []


def test_a_start_where_nothing_can_be_written(sweep_file, small_disk, capsys):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert sweep(sweep_file, small_disk / "run") == 2
    assert f"--out {small_disk}/run: cannot write here: Read-only file system" in capsys.readouterr().err


@pytest.fixture
def finished(undisturbed, tmp_path):
    """Give a copy of the finished run."""
    return Path(shutil.copytree(undisturbed[0], tmp_path / "finished", symlinks=True))


def test_changed_base_weights_are_refused(sweep_file, finished, capsys):
    weights = sweep_file.parent / "model/model.safetensors"
    kept, before = weights.read_bytes(), results(finished)
    try:
        tiny.write_weights(weights.parent, seed=1)
        assert sweep(sweep_file, finished, "--resume") == 2
    finally:
        weights.write_bytes(kept)
    said = capsys.readouterr().err
    assert "model model.safetensors changed since this run was started: then " in said and ", now " in said
    assert differences(before, results(finished)) == []
    assert sweep(sweep_file, finished, "--resume") == 0


def test_a_folder_that_was_moved_goes_on_and_other_data_there_is_refused(
    sweep_file, undisturbed, tmp_path, capsys
):
    there = tmp_path / "moved"
    there.mkdir()
    for name in ("model", "undisturbed"):
        shutil.copytree(sweep_file.parent / name, there / name, symlinks=True)
    for name in (sweep_file.name, "train.jsonl", "eval.jsonl"):
        shutil.copy(sweep_file.parent / name, there / name)
    moved, out = there / sweep_file.name, there / "undisturbed"
    assert sweep(moved, out, "--resume") == 0
    assert parse_yaml((out / "sweep.yaml").read_text(), "sweep")[0]["base_dir"] == str(there)
    assert differences(undisturbed[1], results(out)) == []
    with open(there / "train.jsonl", "a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    capsys.readouterr()
    assert sweep(moved, out, "--resume") == 2
    assert "train.jsonl changed since this run was started" in capsys.readouterr().err


def test_a_changed_starting_adapter_is_refused(sweep_file, undisturbed, tmp_path, capsys):
    start = tmp_path / "start"
    shutil.copytree(undisturbed[0] / "best", start)
    path = sweep_file.with_name("from-adapter.yaml")
    text = parse_yaml(sweep_file.read_text(), "sweep")[0]
    search = {"jobs": [{"learning_rate": 0.01, "init_adapter": str(start), "max_steps": 2}]}
    path.write_text(dump_yaml({**text, "search": search}))
    out = tmp_path / "run"
    for options in ((), ("--resume",)):
        faults.arm("journal=error")  # as soon as the run has begun, for training would tell nothing
        with pytest.raises(RuntimeError, match="journal=error"):
            sweep(path, out, *options)
    other = next(
        p for p in (undisturbed[0] / "jobs").glob("*/adapter") if not p.samefile(undisturbed[0] / "best")
    )
    shutil.copy(other / "adapter_model.safetensors", start)
    capsys.readouterr()
    assert sweep(path, out, "--resume") == 2
    assert (
        f"{start}/adapter_model.safetensors changed since this run was started: then "
        in capsys.readouterr().err
    )


def test_resume_in_a_directory_that_is_no_run_writes_nothing(sweep_file, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    assert sweep(sweep_file, tmp_path / "mine", "--resume") == 2
    assert "not by a sweep" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_directory_called_best_is_left_alone(sweep_file, finished, capsys):
    best = finished / "best"
    best.unlink()
    best.mkdir()
    (best / "notes.txt").write_text("mine")
    assert sweep(sweep_file, finished, "--resume") == 0
    assert (best / "notes.txt").read_text() == "mine"
    assert f"{best} is not the link of an earlier run" in capsys.readouterr().out
