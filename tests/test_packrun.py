"""A pack on its way: scores while it trains, stops, withdrawals, want of memory, fewer slots; on a tiny model."""

import json
from dataclasses import replace

import jax
import pytest

from plora_jax.cli import main
from plora_jax.engine import faults
from plora_jax.engine.journal import Journal
from plora_jax.engine.packrun import PackRun
from plora_jax.evaluation.scorer import Scorer
from tests import tiny
from tests.test_engine import HELD_OUT, TRAIN


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Write a tiny model with weights, and its task."""
    root = tmp_path_factory.mktemp("packs")
    tiny.write_model(root / "model")
    tiny.write_weights(root / "model")
    tiny.write_rows(root / "train.jsonl", TRAIN)
    tiny.write_rows(root / "eval.jsonl", HELD_OUT)
    return root


@pytest.fixture
def arm():
    """Set fault points, and clear them at the end."""
    yield faults.arm
    faults.arm("")


DATA = {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16}


def run(root, out, *options, search, code=0, **sections):
    """Run a sweep and return its leaderboard by job_id."""
    fixed = {"batch_size": 3, "epochs": 4, "targets": ["q_proj", "down_proj"]} | sections.pop("train", {})
    train = {name: value for name, value in fixed.items() if name not in search}
    path = tiny.write_sweep(root, data=DATA, search=search, train=train, **sections)
    assert main(["sweep", str(path), "--out", str(out), *options]) == code
    return {row["job_id"]: row for row in json.loads((out / "leaderboard.json").read_text())["jobs"]}


def lines(out, job_id, name):
    return [json.loads(line) for line in (out / "jobs" / job_id / name).read_text().splitlines()]


def journal(out):
    return [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]


def events(out, kind):
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def test_jobs_are_scored_while_they_train_and_the_best_adapter_is_kept(root, tmp_path):
    search = {"learning_rate": [0.1, 1.0], "rank": [4]}
    train = {"keep": "best", "scheduler": "constant", "max_grad_norm": 0, "epochs": 8}
    rows = run(root, tmp_path / "run", search=search, train=train, eval={"every_steps": 5})
    for job_id, row in rows.items():
        evals = lines(tmp_path / "run", job_id, "evals.jsonl")
        assert [e["step"] for e in evals] == [5, 10, 15, 20, 24] and evals[-1]["fraction"] == 1
        best = min(evals, key=lambda e: e["score"])
        record = json.loads((tmp_path / "run" / "jobs" / job_id / "job.json").read_text())
        assert row["score"] == best["score"] and record["kept_step"] == best["step"]
        losses = [line["loss"] for line in lines(tmp_path / "run", job_id, "metrics.jsonl")]
        assert evals[0]["train_loss"] == pytest.approx(sum(losses[:5]) / 5)
        assert evals[1]["train_loss"] == pytest.approx(sum(losses[5:10]) / 5)
        # the adapter is the one that the score belongs to
        scores = tmp_path / f"{job_id}.json"
        adapter = ["--adapter", str(tmp_path / "run" / row["adapter"])]
        arguments = ["--model", str(root / "model"), *adapter, "--data", str(root / "eval.jsonl")]
        assert main(["eval", *arguments, "--max-length", "16", "--json", str(scores)]) == 0
        assert json.loads(scores.read_text())[1]["loss"] == pytest.approx(row["score"], rel=1e-6)
    assert any(
        row["score"] != lines(tmp_path / "run", j, "evals.jsonl")[-1]["score"] for j, row in rows.items()
    )


def test_of_equal_scores_the_adapter_of_the_lowest_loss_is_kept(root, tmp_path, monkeypatch):
    def score_slots(*args, plain=Scorer.score_slots, **more):
        return [replace(score, score=0.5) for score in plain(*args, **more)]

    monkeypatch.setattr(Scorer, "score_slots", score_slots)
    case = {"search": {"learning_rate": [0.1, 1.0], "rank": [4]}, "eval": {"every_steps": 5}}
    train = {"keep": "best", "scheduler": "constant", "max_grad_norm": 0, "epochs": 8}
    rows, kept = run(root, tmp_path / "run", train=train, **case), set()
    for job_id, row in rows.items():
        evals = lines(tmp_path / "run", job_id, "evals.jsonl")
        record = json.loads((tmp_path / "run" / "jobs" / job_id / "job.json").read_text())
        assert record["kept_step"] == min(evals, key=lambda e: e["loss"])["step"]
        assert row["score"] == 0.5 and row["loss"] == min(e["loss"] for e in evals)
        kept.add(record["kept_step"])
    assert kept != {5}  # which the first score alone would keep


def test_scores_of_which_some_were_lost_are_made_again_by_the_same_program(root, tmp_path, monkeypatch):
    out, asked = tmp_path / "run", []
    case = {"search": {"learning_rate": [0.1, 1.0], "rank": [4]}, "eval": {"every_steps": 5}}
    first = run(root, out, **case)
    whole = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(whole) if json.loads(line)["kind"] == "score")
    assert json.loads(whole[at + 1])["kind"] == "score"  # of the other job, at the same step: it is lost
    (out / "journal.jsonl").write_text("".join(whole[: at + 1]))

    def score_slots(scorer, weights, scales, slots, evals, plain=Scorer.score_slots, **more):
        asked.append(list(slots))
        return plain(scorer, weights, scales, slots, evals, **more)

    monkeypatch.setattr(Scorer, "score_slots", score_slots)
    again = run(root, out, "--resume", **case)
    assert asked[0] == [0, 1]
    for job_id, row in first.items():
        assert (again[job_id]["score"], again[job_id]["loss"]) == (row["score"], row["loss"])
    kept = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    scored = [(line["job_id"], line["step"]) for line in kept if line["kind"] == "score"]
    assert len(scored) == len(set(scored))


def test_last_keeps_the_last_adapter(root, tmp_path):
    search = {"learning_rate": [0.1], "rank": [4]}
    train = {"keep": "last", "scheduler": "constant", "max_grad_norm": 0, "epochs": 8}
    (row,) = run(root, tmp_path / "run", search=search, train=train, eval={"every_epochs": 1}).values()
    evals = lines(tmp_path / "run", row["job_id"], "evals.jsonl")
    assert [e["step"] for e in evals] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert row["score"] == evals[-1]["score"] != min(e["score"] for e in evals)


@pytest.fixture
def compiled():
    """List what XLA compiles from here on."""
    found: list[str] = []

    def listen(event, *_, fun_name="", **__):
        if "backend_compile" in event and "lambda" not in fun_name:  # loading a model allocates by a lambda
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


def test_a_stopped_jobs_slot_is_refilled_by_the_same_program(root, tmp_path, compiled):
    rates = [1.0, 3.0, 0.05, 2.0, 0.02, 0.03]
    jobs = [{"learning_rate": rate, "rank": 4} for rate in rates]
    more = {"train": {"epochs": 8, "max_grad_norm": 0, "slots": 2}, "eval": {"every_epochs": 4}}
    stop = {"early_stop": {"method": "asha", "reduction_factor": 2}}
    jax.clear_caches()  # of the tests before, one of which may have had this program
    run(root, tmp_path / "warm", search={"jobs": jobs[:2]}, **more, **stop)  # one is stopped
    assert compiled  # it does count
    compiled.clear()
    rows = run(root, tmp_path / "run", search={"jobs": jobs}, **more, **stop)
    assert compiled == []
    by_rate = {row["learning_rate"]: row for row in rows.values()}
    stopped = [row for row in rows.values() if row["status"] == "stopped"]
    assert by_rate[3.0] in stopped and by_rate[0.03]["status"] == "completed" and len(stopped) >= 2
    for row in stopped:
        assert row["reason"] and row["steps"] < 24 and row["score"] is not None
        assert (tmp_path / "run" / row["adapter"] / "adapter_model.safetensors").exists()
    journal = Journal(tmp_path / "run" / "journal.jsonl").refresh()
    first = [job_id for (_, at, _), job_id in journal.places.items() if at == 0]
    late = [row for row in rows.values() if row["job_id"] not in first]
    assert len(first) == 2 and len(late) == 4
    # a job that took a freed slot goes the way, bit for bit, of one that began in a fresh pack of that program
    again = max(late, key=lambda row: row["steps"])
    order = sorted(jobs, key=lambda job: job["learning_rate"] != again["learning_rate"])
    run(root, tmp_path / "fresh", search={"jobs": order[:2]}, **more)
    went = [
        (tmp_path / out / f"jobs/{again['job_id']}/metrics.jsonl").read_text() for out in ("run", "fresh")
    ]
    assert again["steps"] >= 6 and went[0].count("\n") == again["steps"]
    assert went[1].startswith(went[0])


def test_a_job_that_diverges_is_told_from_the_base_model_at_its_first_score(root, tmp_path):
    stop = {"method": "plateau", "max_loss_ratio": 1.0, "every": 0.25}
    train = {"scheduler": "constant", "max_grad_norm": 0, "targets": "all-linear"}
    search = {"learning_rate": [0.01, 1.0], "rank": [4]}
    often = {"every_steps": 1}
    rows = run(root, tmp_path / "run", search=search, train=train, eval=often, early_stop=stop)
    base = json.loads((tmp_path / "run" / "leaderboard.json").read_text())["base"]["loss"]
    sound, lost = sorted(rows.values(), key=lambda row: row["learning_rate"])
    assert sound["status"] == "completed" and sound["loss"] < base
    assert lost["status"] == "stopped" and lost["steps"] == 1 and lost["loss"] > base
    assert f"diverged: held-out loss {lost['loss']:.4g}, {base:.4g} at the start" in lost["reason"]


def test_out_of_memory_shrinks_the_program_and_the_run_goes_on(root, tmp_path, arm):
    search = {"learning_rate": [0.01, 0.02, 0.03, 0.05], "rank": [4]}
    whole = run(root, tmp_path / "whole", search=search)
    arm("step:2=oom,step:3=oom,step:4=oom,step:9=oom")
    rows = run(root, tmp_path / "run", search=search)
    told = events(tmp_path / "run", "out_of_memory")
    assert [event["slots"] for event in told] == [4, 4, 2, 1]  # first more recompute, twice; then fewer slots
    limits = [change for change in journal(tmp_path / "run") if change["kind"] == "limit"]
    assert [change["policy"] for change in limits] == ["dots", "layer", "layer", "layer"]
    assert rows.keys() == whole.keys()
    for job_id, row in rows.items():
        assert row["status"] == "completed" and row["steps"] == whole[job_id]["steps"]
        assert row["loss"] == pytest.approx(whole[job_id]["loss"], rel=1e-4)
        assert len(lines(tmp_path / "run", job_id, "metrics.jsonl")) == row["steps"]


def test_what_is_trained_again_leaves_nothing_of_a_job_that_had_ended(root, tmp_path, arm):
    """A pack is lost after one of its jobs was stopped, and begins again: the job's adapter is in place already."""
    more = {"train": {"epochs": 8, "max_grad_norm": 0}, "eval": {"every_steps": 2}}
    stop = {"early_stop": {"method": "asha", "reduction_factor": 2}}
    search = {"jobs": [{"learning_rate": rate, "rank": 4} for rate in (0.02, 3.0)]}
    run(root, tmp_path / "calm", search=search, **more, **stop)
    arm("step:20=error")
    rows = run(root, tmp_path / "run", search=search, **more, **stop)
    assert events(tmp_path / "run", "error")
    (stopped,) = [row for row in rows.values() if row["status"] == "stopped"]
    assert stopped["steps"] < 20
    for job_id in rows:
        found = [sorted(p.name for p in (tmp_path / r / "jobs" / job_id).iterdir()) for r in ("calm", "run")]
        assert found[0] == found[1] and "best" not in found[1]


def test_a_pack_that_fails_each_time_is_given_up_with_its_cause(root, tmp_path, arm):
    arm(",".join(f"step:{n}=error" for n in range(1, 10)))
    rows = run(root, tmp_path / "run", search={"learning_rate": [0.01], "rank": [4]}, code=1)
    (row,) = rows.values()
    assert row["status"] == "failed" and "begun 3 times and lost" in row["reason"]
    arm("")
    # a later start finds it failed, as it was recorded
    rows = run(root, tmp_path / "run", "--resume", search={"learning_rate": [0.01], "rank": [4]}, code=1)
    assert rows[row["job_id"]]["status"] == "failed"


def test_fewer_slots_when_few_jobs_are_left(root, tmp_path, monkeypatch):
    monkeypatch.setattr("plora_jax.engine.packrun.PAYS_AFTER", 4)
    jobs = [{"learning_rate": 0.01 * (1 + n), "rank": 4, "max_steps": 24 if n == 2 else 4} for n in range(4)]
    rows = run(root, tmp_path / "run", search={"jobs": jobs})
    (event,) = events(tmp_path / "run", "shrunk")
    assert event["slots"] == 1
    told = events(tmp_path / "run", "compiled")
    assert [(line["slots"], line["micro_step"]) for line in told] == [(2, 1), (1, event["micro_step"] + 1)]
    assert all(line["compile_s"] > 0 for line in told)
    alone = run(root, tmp_path / "alone", search={"jobs": [jobs[2]]})
    (job_id,) = alone
    assert rows[job_id]["loss"] == pytest.approx(alone[job_id]["loss"], rel=1e-4)
    assert [line["step"] for line in lines(tmp_path / "run", job_id, "metrics.jsonl")] == list(range(1, 25))


def test_jobs_are_added_and_withdrawn(root, tmp_path, capsys):
    out, search = tmp_path / "run", {"learning_rate": [0.01, 0.02], "rank": [4]}
    run(root, out, search=search)
    more = tmp_path / "more.yaml"
    more.write_text("jobs:\n- {learning_rate: 0.05, rank: 2}\n- {learning_rate: 0.06, rank: 2}\n")
    assert main(["add", str(out), str(more)]) == 0
    assert "2 jobs added" in capsys.readouterr().out
    added = [name for name in Journal(out / "journal.jsonl").refresh().jobs if name.startswith("r2-")]
    assert main(["stop", str(out), added[0]]) == 0
    rows = run(root, out, "--resume", search=search)
    assert len(rows) == 4 and rows[added[1]]["status"] == "completed" and rows[added[1]]["steps"] == 12
    assert rows[added[0]]["status"] == "stopped" and "withdrawn" in rows[added[0]]["reason"]
    for arguments, told in (
        (["add", str(out), str(more)], "in this run already"),
        (["stop", str(out), added[1]], "has ended already"),
        (["stop", str(out), "nobody"], "no such job"),
        (["stop", str(tmp_path), "r2"], "no run"),
    ):
        assert main(arguments) == 2 and told in capsys.readouterr().err
    more.write_text("model: other\njobs: [{learning_rate: 0.1}]\n")
    assert main(["add", str(out), str(more)]) == 2 and "model" in capsys.readouterr().err


@pytest.mark.parametrize(("keep", "at", "kept", "evals"), [
    ("last", 7, 7, [5, 7]), ("last", 10, 10, [5, 10]), ("last", 3, None, []), ("best", 7, 5, [5]),
])  # fmt: skip
def test_a_job_withdrawn_between_evaluations_has_the_adapter_of_its_score(
    root, tmp_path, monkeypatch, keep, at, kept, evals
):
    def look(pack, micro_step):
        if micro_step == at:
            where = {"pack": pack.name, "at": at, "slot": 0, "job_id": pack._held(0).job_id}
            with pack.journal.locked():
                pack.journal.append("stop", **where, reason="withdrawn")

    monkeypatch.setattr(PackRun, "_look", look)
    train = {"keep": keep, "epochs": 8}
    search = {"learning_rate": [0.1, 0.01], "rank": [4]}
    rows = run(root, tmp_path / "run", search=search, train=train, eval={"every_steps": 5}, code=0)
    (row,) = [row for row in rows.values() if row["status"] != "completed"]
    assert (
        len(rows) == 2 and row["steps"] == at and "withdrawn" in row["reason"] and row["status"] == "stopped"
    )
    logged = lines(tmp_path / "run", row["job_id"], "evals.jsonl") if evals else []
    assert [line["step"] for line in logged] == evals
    record = json.loads((tmp_path / "run" / "jobs" / row["job_id"] / "job.json").read_text())
    assert record.get("kept_step") == kept
    if kept:
        assert (tmp_path / "run" / row["adapter"]).is_dir()
        assert row["score"] == next(line["score"] for line in logged if line["step"] == kept)
    else:
        assert "before it was scored" in row["reason"] and row["score"] is None and not row["adapter"]


@pytest.mark.parametrize("stop", [None, {"method": "median", "min_jobs": 1, "grace_period": 0.3}])
def test_jobs_are_drawn_as_slots_fall_free_and_a_resumed_run_draws_the_same(root, tmp_path, arm, stop):
    pytest.importorskip("optuna")
    space = {"learning_rate": {"log_uniform": [1e-3, 1.0]}, "rank": [2, 4], "batch_size": [3, 6]}
    search = space | {"method": "optuna", "budget": {"jobs": 6}, "seed": 3}
    train = {"train": {"epochs": 4, "slots": 2}, "early_stop": stop}
    rows = run(root, tmp_path / "run", search=search, **train)
    assert len(rows) == 6 and {row["rank"] for row in rows.values()} <= {2, 4}
    journal = Journal(tmp_path / "run" / "journal.jsonl").refresh()
    kinds = [kind for kind, _ in journal.search]
    assert kinds.count("ask") == kinds.count("tell") == 6 and kinds[:3] == ["ask", "ask", "tell"]
    assert all(name in journal.jobs for _, name in journal.places.items())
    arm("step:9=error")  # lost in the middle, and begun again
    again = run(root, tmp_path / "again", search=search, **train)
    same = ("learning_rate", "rank", "batch_size", "score", "steps", "status")
    assert {j: [row[n] for n in same] for j, row in rows.items()} == {
        j: [row[n] for n in same] for j, row in again.items()
    }


def test_a_budget_of_tokens_ends_the_draws(root, tmp_path):
    search = {"learning_rate": {"log_uniform": [1e-3, 1.0]}, "method": "random", "budget": {"tokens": 150}}
    rows = run(root, tmp_path / "run", search=search, train={"epochs": 2, "slots": 2})
    each = next(iter(rows.values()))["tokens"]
    assert each * (len(rows) - 1) < 150 <= each * (len(rows) + 1)
