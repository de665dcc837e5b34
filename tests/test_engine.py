"""A whole sweep on a tiny model, through the command line, checked against numbers worked out beside it."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from plora_jax.adapters import scales
from plora_jax.cli import main
from plora_jax.config.sweep import load_sweep, parse_sweep, resolved
from plora_jax.data.encode import read_examples
from plora_jax.engine.driver import described
from plora_jax.jobs import Job
from plora_jax.models.config import config_from_hf
from plora_jax.models.decoder import LoRA
from plora_jax.models.load import load_base
from plora_jax.models.table import checkpoint_table
from plora_jax.peft import import_adapter
from plora_jax.search.configurations import search_jobs
from tests import tiny
from tests.models.seeded import seeded
from tests.page import parse

TRAIN = [
    {"prompt": f"what is the {a} {b} ?", "completion": f" {'yes' if a == b else 'no'}"}
    for a in ("one", "two", "three")
    for b in ("one", "two", "red")
]
HELD_OUT = [
    {"prompt": "is one one ?", "completion": " yes"},
    {"prompt": "is one blue ?", "completion": " no"},
    {"prompt": "the color is green ?", "completion": " no"},
]


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory):
    """Write a tiny model with weights, a task with three parts, and a sweep of four jobs over two seeds."""
    root = tmp_path_factory.mktemp("sweep")
    model = tiny.write_model(root / "model", hidden_size=32, intermediate_size=48)
    config = config_from_hf(json.loads((model / "config.json").read_text()))
    tensors = {key: seeded(key, tensor.shape) for key, tensor in checkpoint_table(config).items()}
    save_file(tensors, model / "model.safetensors")
    tiny.write_rows(root / "train.jsonl", TRAIN)
    tiny.write_rows(root / "eval.jsonl", HELD_OUT)
    tiny.write_rows(root / "test.jsonl", [{"prompt": "is red red ?", "completion": " yes"}])
    data = {"train": "train.jsonl", "eval": "eval.jsonl", "test": "test.jsonl", "max_length": 16}
    return tiny.write_sweep(
        root,
        data=data | {"metric": "choice_accuracy"},
        search={"rank": [3, 8], "learning_rate": [0.03]},
        train={"batch_size": 4, "epochs": 3, "seeds": [0, 1], "warmup_steps": 1},
    )


@pytest.fixture(scope="module")
def run(sweep_file):
    """Run the sweep once."""
    out = sweep_file.parent / "run"
    assert main(["sweep", str(sweep_file), "--out", str(out)]) == 0
    return out


def reference_loss(base, job, adapter, examples):
    """Compute an adapter's mean loss from whole logits, in float64, one row at a time."""
    scale = scales(base.config, job)
    sites = {name: LoRA(f.a, f.b, scale[name]) for name, f in adapter.items()}
    total, count = 0.0, 0
    for tokens, trained in zip(examples.tokens, examples.trained, strict=True):
        at = jnp.arange(len(tokens))[None]
        hidden = base.model().hidden(jnp.asarray(tokens)[None], at, jnp.zeros_like(at), sites)
        logits = np.asarray(base.model().logits(hidden)[0], np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for s in np.flatnonzero(trained):
            total, count = total - log_p[s - 1, tokens[s]], count + 1
    return total / count


def test_everything_promised_is_in_the_run_directory(run, sweep_file):
    jobs = search_jobs(load_sweep(sweep_file))
    board = json.loads((run / "leaderboard.json").read_text())
    assert {row["job_id"] for row in board["jobs"]} == {job.job_id for job in jobs} and len(jobs) == 4
    assert board["metric"] == "choice_accuracy" and board["higher_is_better"] and board["base"]["rows"] == 3
    assert board["test"]["rows"] == 1 and board["test"]["best"]["job_id"] == board["jobs"][0]["job_id"]
    means = [row["mean_score"] for row in board["jobs"]]
    assert means == sorted(means, reverse=True) and all(row["seeds"] == 2 for row in board["jobs"])
    rows = list(csv.DictReader((run / "leaderboard.csv").open()))
    assert [row["job_id"] for row in rows] == [row["job_id"] for row in board["jobs"]]
    page = parse((run / "report.html").read_text(encoding="utf-8"))
    shown = [row.find("code")[0].text for row in page.find("tbody", class_="jobs")[0].find("tr")]
    assert shown == [row["job_id"] for row in board["jobs"]] and "finished" in page.find("header")[0].text
    assert len(page.find("svg", class_="lanes")) == 2  # the plan, and what ran
    plan = json.loads((run / "plan.json").read_text())
    assert sorted(a["job_id"] for pack in plan["packs"] for a in pack["assign"]) == sorted(plan["jobs"])
    assert (run / "best" / "adapter_model.safetensors").samefile(
        run / board["jobs"][0]["adapter"] / "adapter_model.safetensors"
    )
    for job in jobs:
        lines = [
            json.loads(line)
            for line in (run / "jobs" / job.job_id / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines] == list(range(1, 10))  # ceil(9 rows / 4) steps, three epochs
        assert lines[0]["lr"] == 0.0 and lines[1]["lr"] == pytest.approx(0.03)
        assert lines[-1]["loss"] < lines[0]["loss"]
        record = json.loads((run / "jobs" / job.job_id / "job.json").read_text())
        assert record["status"] == "completed" and record["steps"] == 9


def test_the_leaderboard_tells_the_losses_of_the_exported_adapters(run, sweep_file):
    base = load_base(str(sweep_file.parent / "model"), precision="fp32")
    examples = read_examples(sweep_file.parent / "eval.jsonl", base.tokenizer, max_length=16)
    board = {row["job_id"]: row for row in json.loads((run / "leaderboard.json").read_text())["jobs"]}
    for job in search_jobs(load_sweep(sweep_file)):
        adapter, fields = import_adapter(run / "jobs" / job.job_id / "adapter", base.config)
        assert fields["rank"] == job.rank
        want = reference_loss(base, job, adapter, examples)
        assert board[job.job_id]["loss"] == pytest.approx(want, rel=1e-5)
        assert all(np.abs(f.b).max() > 0 for f in adapter.values())  # it did train
    losses = [row["loss"] for row in board.values()]
    assert len(set(losses)) == 4  # and seeds and ranks do differ


def test_eval_command_gives_the_leaderboards_numbers(run, sweep_file, tmp_path):
    best = json.loads((run / "leaderboard.json").read_text())
    arguments = ["--model", str(sweep_file.parent / "model"), "--adapter", str(run / "best")]
    arguments += ["--data", str(sweep_file.parent / "eval.jsonl"), "--metric", "choice_accuracy"]
    assert main(["eval", *arguments, "--json", str(tmp_path / "scores.json")]) == 0
    base, adapter = json.loads((tmp_path / "scores.json").read_text())
    assert base["loss"] == pytest.approx(best["base"]["loss"], rel=1e-5) and base["adapter"] is None
    assert adapter["loss"] == pytest.approx(best["jobs"][0]["loss"], rel=1e-5)
    assert adapter["score"] == best["jobs"][0]["score"] and adapter["rows"] == 3


def test_a_finished_run_resumes_to_itself(run, sweep_file):
    logs = ("events.jsonl", "journal.jsonl", "report.html")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in logs}
    assert main(["sweep", str(sweep_file), "--out", str(run), "--resume"]) == 0
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("gone", ["job.json", "adapter", "half"])
def test_resume_trains_what_is_missing_to_the_same_numbers(run, sweep_file, tmp_path, gone):
    board = json.loads((run / "leaderboard.json").read_text())
    lost = board["jobs"][-1]["job_id"]
    record = run / "jobs" / lost / "job.json"
    kept = record.read_text()
    if gone == "job.json":
        record.unlink()
    elif gone == "half":
        record.write_text('{"status": "completed"}')
    else:
        (run / "jobs" / lost / gone).rename(tmp_path / "gone")
    assert main(["sweep", str(sweep_file), "--out", str(run), "--resume"]) == 0
    again, was = json.loads(record.read_text()), json.loads(kept)
    assert again["steps"] == was["steps"] and again["tokens"] == was["tokens"]
    assert again["score"]["loss"] == pytest.approx(was["score"]["loss"], rel=1e-5)


def test_a_used_directory_and_a_changed_sweep_are_refused(run, sweep_file, capsys, tmp_path):
    assert main(["sweep", str(sweep_file), "--out", str(run)]) == 2
    assert "already used" in capsys.readouterr().err
    text = sweep_file.read_text().replace("epochs: 3", "epochs: 2")
    changed = sweep_file.with_name("changed.yaml")
    changed.write_text(text)
    assert main(["sweep", str(changed), "--out", str(run), "--resume"]) == 2
    message = capsys.readouterr().err
    assert "-  epochs: 3" in message and "+  epochs: 2" in message


def test_changed_rows_are_refused(run, sweep_file, capsys):
    rows = sweep_file.parent / "train.jsonl"
    before = rows.read_text()
    tiny.write_rows(rows, TRAIN[:-1])
    assert main(["sweep", str(sweep_file), "--out", str(run), "--resume"]) == 2
    assert "train.jsonl changed since this run was started" in capsys.readouterr().err
    rows.write_text(before)
    assert main(["sweep", str(sweep_file), "--out", str(run), "--resume"]) == 0


def test_dry_run_writes_nothing(sweep_file, tmp_path, capsys):
    assert main(["sweep", str(sweep_file), "--out", str(tmp_path / "no"), "--dry-run"]) == 0
    assert not (tmp_path / "no").exists() and "makespan" in capsys.readouterr().out


def test_it_needs_held_out_rows(sweep_file, tmp_path, capsys):
    text = sweep_file.read_text().replace("  eval: eval.jsonl\n", "").replace("  test: test.jsonl\n", "")
    other = sweep_file.with_name("no-eval.yaml")
    other.write_text(text)
    assert main(["sweep", str(other), "--out", str(tmp_path / "no")]) == 2
    assert "data.eval" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_a_job_whose_gradients_blow_up_fails_alone(sweep_file, tmp_path):
    jobs = [
        {"learning_rate": 0.03},
        {"learning_rate": 1e38},
        {"learning_rate": 1e30, "max_steps": 2},  # ends before its gradients tell
        {"learning_rate": 0.03, "alpha": 1e38, "max_steps": 2},
    ]
    search = {"jobs": [{"rank": 3, **job} for job in jobs]}
    path = tiny.write_sweep(
        sweep_file.parent,
        data={"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16},
        search=search,
        train={"batch_size": 1, "epochs": 3, "max_grad_norm": 0},
    )
    out = tmp_path / "run"
    assert main(["sweep", str(path), "--out", str(out)]) == 1
    good, *bad = json.loads((out / "leaderboard.json").read_text())["jobs"]
    assert good["status"] == "completed" and np.isfinite(good["loss"])
    assert all(row["status"] == "failed" and row["score"] is None for row in bad)
    assert sorted(row["reason"] for row in bad) == [
        "10 gradients in a row were not finite",
        "no gradient was finite",
        "the loss on held-out rows is not finite",
    ]
    jax.clear_caches()


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        Job(
            rank=4, alpha=8.0, targets=("q_proj", "v_proj"), max_steps=5, warmup_steps=2, train="other.jsonl"
        ),
        Job(optimizer="sgd", momentum=0.9, rank_pattern=(("q_proj", 2),), seed=3),
    ],
)
def test_the_file_of_a_run_from_python_names_its_jobs(job: Job) -> None:
    sweep = described("org/model", [job, Job(learning_rate=1e-3)], {"train": "train.jsonl"})
    assert search_jobs(parse_sweep(resolved(sweep))) == [job, Job(learning_rate=1e-3)]


def test_what_a_run_uses_is_in_its_events(run):
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["event"] == "sample"]
    assert {line["worker"] for line in found} == {"0"}
    assert all(line["host_rss_bytes"] > 1e8 and line["host_free_bytes"] > 0 for line in found)
    assert "host_rss_bytes" in json.loads((run / "workers" / "0.json").read_text())


def test_packing_changes_the_layout_and_no_number(run, sweep_file, tmp_path):
    text = (run / "sweep.yaml").read_text()
    assert "  packing: false\n" in text
    other = sweep_file.with_name("packing.yaml")
    other.write_text(text.replace("  packing: false\n", "  packing: true\n"))
    out = tmp_path / "packed"
    assert main(["sweep", str(other), "--out", str(out)]) == 0
    padded, packed = (
        {row["job_id"]: row for row in json.loads((r / "leaderboard.json").read_text())["jobs"]}
        for r in (run, out)
    )
    assert padded.keys() == packed.keys()
    for job_id, row in packed.items():
        assert row["loss"] == pytest.approx(padded[job_id]["loss"], rel=1e-4)
        assert row["tokens"] == padded[job_id]["tokens"] and row["steps"] == padded[job_id]["steps"]
        lines = [
            [
                json.loads(line)["loss"]
                for line in (r / "jobs" / job_id / "metrics.jsonl").read_text().splitlines()
            ]
            for r in (run, out)
        ]
        assert lines[0] == pytest.approx(lines[1], rel=1e-4)
