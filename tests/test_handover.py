"""What the driver has read reaches its workers whole, and a worker that generates nothing needs no tokenizer."""

import json
import subprocess
import sys
from dataclasses import asdict, fields

import numpy as np
import pytest
from rich.console import Console

from plora_jax.cli import main
from plora_jax.config.sweep import load_sweep
from plora_jax.engine import driver, faults
from plora_jax.engine.handover import ROWS, hand_over, take_over
from plora_jax.engine.task import read_task
from plora_jax.engine.worker import Worker
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.launch.site import LaunchOptions, find_site
from plora_jax.models.find import load_tokenizer
from scripts.kill_test import differences, results
from tests import tiny
from tests.test_engine import HELD_OUT, TRAIN

METRICS = {
    "loss": {"metric": "loss"},
    "choices": {"metric": "choice_accuracy", "choices": [" yes", " no"]},
    "answers": {"metric": "exact_match", "answer": {"regex": "y|n"}, "max_new_tokens": 3},
    "own": {"metric": "graders:length", "max_new_tokens": 3},
}


@pytest.fixture
def root(tmp_path):
    """Write a tiny model with weights, and a task with three parts."""
    tiny.write_model(tmp_path / "model")
    tiny.write_weights(tmp_path / "model")
    for name, rows in (("train", TRAIN), ("other", TRAIN[:4]), ("eval", HELD_OUT), ("test", HELD_OUT[1:])):
        tiny.write_rows(tmp_path / f"{name}.jsonl", rows)
    grader = "def length(predictions, references):\n    return [len(r) for r in references]\n"
    (tmp_path / "graders.py").write_text(grader)
    return tmp_path


def write(root, **data):
    files = {name: f"{name}.jsonl" for name in ("train", "eval", "test")}
    jobs = [{"rank": 4, "learning_rate": 0.01 * n} for n in (1, 2)]
    return tiny.write_sweep(root, data=files | {"max_length": 16} | data, search={"jobs": jobs})


def same(one, two):
    """Tell whether two parts of a task are equal, arrays by dtype and value."""
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if hasattr(one, "_fields"):
        return all(map(same, one, two))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))
    return one == two


@pytest.mark.parametrize("metric", METRICS)
def test_rows_handed_over_are_the_rows_read(root, metric):
    sweep = load_sweep(write(root, **METRICS[metric]))
    jobs = [Job(rank=4), Job(rank=8, train="other.jsonl")]
    tokenizer = load_tokenizer(str(root / "model"))
    read = read_task(sweep, jobs, tokenizer, 64, Console(quiet=True))
    hand_over(root, read)
    asked = []
    taken = take_over(root, sweep, jobs, lambda: asked.append(1) or tokenizer)
    assert taken.digests == read.digests and list(taken.files) == list(read.files)
    for one, two in [*zip(read.files.values(), taken.files.values(), strict=True)]:
        assert same(list(one.tokens), list(two.tokens)) and same(list(one.trained), list(two.trained))
        assert one.report == two.report
    assert {name: rows.digest for name, rows in taken.train.items()} == {
        name: rows.digest for name, rows in read.train.items()
    }
    for one, two in ((read.eval, taken.eval), (read.test, taken.test)):
        assert same(one.requests, two.requests) and same(one.choices, two.choices)
        assert all(same(getattr(one, name), getattr(two, name)) for name in ("loss", "counts", "options"))
        assert one.tokens == two.tokens and one.longest == two.longest
        if metric in ("answers", "own"):
            left, right = asdict(one.questions), asdict(two.questions)
            assert left.pop("tokenizer")() is tokenizer and right.pop("tokenizer")
            assert same(left.pop("prompts"), right.pop("prompts"))
            assert left.pop("metric")[0] == right.pop("metric")[0] and left == right
            assert two.questions.proportion == (metric == "answers")
            values = two.questions.grade(["no"] * one.rows)
            assert values.tolist() == one.questions.grade(["no"] * one.rows).tolist() and values.any()
            assert not asked
            ids = [np.array(tokenizer("yes no").input_ids)] * one.rows
            assert two.questions.texts(ids) == one.questions.texts(ids) and asked
            asked.clear()
    assert not asked


@pytest.mark.parametrize(
    "harm", ["torn", "flipped", "absent", "encrypted", "another archive", "another file"]
)
def test_what_is_not_whole_or_not_all_is_not_taken(root, harm):
    sweep = load_sweep(write(root))
    tokenizer = load_tokenizer(str(root / "model"))
    hand_over(root, read_task(sweep, [Job()], tokenizer, 64, Console(quiet=True)))
    path, jobs = root / ROWS, [Job()]
    whole = path.read_bytes()
    assert take_over(root, sweep, jobs, lambda: None)
    if harm == "torn":
        path.write_bytes(whole[:-40])
    elif harm == "flipped":
        at = whole.index(b"file0.tokens.npy") + 200
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif harm == "absent":
        path.unlink()
    elif harm == "encrypted":  # a bit of the archive's directory
        at = whole.index(b"PK\x01\x02") + 8
        path.write_bytes(whole[:at] + bytes([whole[at] | 1]) + whole[at + 1 :])
    elif harm == "another archive":
        np.savez(path, tokens=np.zeros(3))
    else:
        jobs.append(Job(rank=8, train="other.jsonl"))
    assert take_over(root, sweep, jobs, lambda: None) is None


class Nobody:
    """A launcher whose workers are others' to start."""

    def start(self, run, groups):
        self.run = run

    def alive(self):
        return False

    def stop(self):
        pass


def begin(root, monkeypatch, **data):
    """Have the driver make a run that no worker has begun, and return its directory."""
    site = find_site(LaunchOptions("inline"), "cpu")._replace(launcher=Nobody())
    monkeypatch.setattr(driver, "_site", lambda *_: site)
    assert main(["sweep", str(write(root, **data)), "--out", str(root / "run")]) == 1
    monkeypatch.undo()
    return root / "run"


@pytest.mark.parametrize("metric", ["loss", "choices"])
def test_a_worker_reads_no_data_and_imports_neither_transformers_nor_torch(root, monkeypatch, metric):
    path = write(root, **METRICS[metric])
    assert main(["sweep", str(path), "--out", str(root / "undisturbed")]) == 0
    run = begin(root, monkeypatch, **METRICS[metric])
    kept = {name: (root / name).read_bytes() for name in ("train.jsonl", "eval.jsonl", "test.jsonl")}
    for name in kept:
        (root / name).write_text("changed, and no rows\n")
    code = (
        "import sys; from plora_jax.engine.worker import main\n"
        f"code = main([{str(run)!r}])\n"
        "print(code, [name for name in ('transformers', 'torch', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []"
    for name, content in kept.items():
        (root / name).write_bytes(content)
    assert main(["sweep", str(path), "--out", str(run), "--resume"]) == 0
    assert differences(results(root / "undisturbed"), results(run)) == []
    assert not (run / ROWS).exists()  # it went with the end of the run


def test_without_the_file_a_worker_reads_what_the_run_was_started_with_or_says_what_changed(
    root, monkeypatch
):
    run = begin(root, monkeypatch)
    (run / ROWS).unlink()
    worker = Worker(run, console=Console(quiet=True))
    assert len(worker.task().files["train.jsonl"]) == len(TRAIN)
    worker.close()
    tiny.write_rows(root / "train.jsonl", TRAIN[1:])
    worker = Worker(run, console=Console(quiet=True))
    with pytest.raises(UserError, match=r"train\.jsonl changed since this run was started: then \w{16}, now"):
        worker.task()
    worker.close()


def test_a_disk_that_is_full_leaves_no_part_of_the_file(root):
    sweep = load_sweep(write(root))
    task = read_task(sweep, [Job()], load_tokenizer(str(root / "model")), 64, Console(quiet=True))
    faults.arm(f"{ROWS}=enospc")
    try:
        with pytest.raises(OSError, match=ROWS):
            hand_over(root, task)
    finally:
        faults.arm("")
    assert not list(root.glob(f"*{ROWS}*")) and not list(root.glob(".*.tmp"))


def test_a_worker_that_finds_its_model_broken_says_so_as_before(root, monkeypatch):
    run = begin(root, monkeypatch)
    config = json.loads((root / "model" / "config.json").read_text())
    (root / "model" / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    with pytest.raises(UserError, match="unheard-of"):
        Worker(run, console=Console(quiet=True))
