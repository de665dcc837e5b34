"""Sweeps that are planned rung by rung: jobs wait at rungs, go on in other packs, and lose nothing on the way."""

import json
import shutil

import numpy as np
import pytest

from plora_jax.cli import main
from plora_jax.engine import rung
from plora_jax.engine.journal import Journal
from plora_jax.engine.packrun import PackRun
from plora_jax.report.runview import open_view
from scripts.kill_test import differences, results
from tests.test_packrun import arm, events, lines, root, run  # noqa: F401  fixtures

RATES = [1.0, 3.0, 0.05, 2.0, 0.02, 0.03, 0.5, 0.01, 0.1]
SEARCH = {"jobs": [{"learning_rate": rate, "rank": 4 if n % 2 else 12} for n, rate in enumerate(RATES)]}
MORE = {"train": {"epochs": 6, "max_grad_norm": 0, "slots": 4, "keep": "last", "targets": "all-linear"}}


def stop(method="asha", pause="always", **more):
    return {"early_stop": {"method": method, "pause": pause, **more}}


def state_of(out):
    journal = Journal(out / "journal.jsonl")
    state = journal.refresh()
    journal.close()
    return state


def test_jobs_climb_from_pack_to_pack(root, tmp_path):  # noqa: F811
    """Nine jobs of 18 steps, rungs at 2 and 6: three pass the first, one the second."""
    rows = run(root, tmp_path / "run", search=SEARCH, **MORE, **stop("halving"))
    ends = sorted(row["steps"] for row in rows.values())
    assert ends == [2] * 6 + [6] * 2 + [18]
    state = state_of(tmp_path / "run")
    by_rung = {}
    for pack in state.packs.values():
        by_rung.setdefault(pack["rung"], set()).update(pack["jobs"])
    assert {rung: len(jobs) for rung, jobs in by_rung.items()} == {0: 9, 1: 3, 2: 1}
    # by hand: the best three of nine at step 2, the best of these at step 6
    scores = {key: line["value"] for key, line in state.scores.items()}
    first = sorted(rows, key=lambda job: scores[job, 2])[:3]
    assert by_rung[1] == set(first) and by_rung[2] == {min(first, key=lambda job: scores[job, 6])}
    for job_id, row in rows.items():
        told = lines(tmp_path / "run", job_id, "metrics.jsonl")
        assert [line["step"] for line in told] == list(range(1, row["steps"] + 1))
        evals = [line["step"] for line in lines(tmp_path / "run", job_id, "evals.jsonl")]
        assert evals == [step for step in (2, 6, 18) if step <= row["steps"]]
        assert (tmp_path / "run" / row["adapter"] / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "waiting").exists() and len(events(tmp_path / "run", "rung")) == 2


@pytest.fixture(scope="module")
def calm(root, tmp_path_factory):  # noqa: F811
    """Give a sweep with `asha`, rung by rung, that nothing disturbed; jobs differ in rank and are more than slots."""
    out = tmp_path_factory.mktemp("calm") / "run"
    rows = run(root, out, search=SEARCH, **MORE, **stop())
    return out, rows, results(out)


def test_asha_rung_by_rung_stops_on_arrival_and_once_more_before_the_next_plan(calm):
    out, rows, _ = calm
    state = state_of(out)
    ends = sorted(row["steps"] for row in rows.values())
    assert ends.count(18) == 1 and set(ends) == {2, 6, 18}
    where = {}
    for line in (json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()):
        if line["kind"] == "verdict" and line["stop"]:
            where.setdefault(line["job_id"], []).append(line["step"])
    assert {job: row["status"] for job, row in rows.items()} == {
        job: "stopped" if job in where else "completed" for job in rows
    }
    # at most one in three of all that came to a rung went on from it
    came = [sum(row["steps"] >= step for row in rows.values()) for step in (2, 6)]
    went = [len({job for p in state.packs.values() if p["rung"] == k for job in p["jobs"]}) for k in (1, 2)]
    assert went[0] <= came[0] // 3 and went[1] <= max(1, came[1] // 3) and went[0] >= went[1] == 1


def test_the_report_shows_where_a_job_was(calm):
    out, rows, _ = calm
    (moved,) = [job for job, row in rows.items() if row["steps"] == 18]
    _, view = open_view(out)
    bars = sorted((bar for bar in view.bars if bar.job_id == moved), key=lambda bar: bar.start)
    packs = state_of(out).packs
    assert [packs[bar.pack]["rung"] for bar in bars] == [0, 1, 2]
    paused = {
        event["step"]: view.clock(event["time"])
        for event in events(out, "paused")
        if event["job_id"] == moved
    }
    assert [bar.end for bar in bars[:2]] == pytest.approx([paused[2], paused[6]], abs=0.5)
    spans = {span.pack: span for span in view.spans}
    assert bars[0].end < spans[bars[0].pack].end  # it left before its pack ended


def test_a_job_that_moved_was_trained_as_one_that_did_not(calm, root, tmp_path):  # noqa: F811
    out, rows, _ = calm
    (moved,) = [job for job, row in rows.items() if row["steps"] == 18]
    alone = {"jobs": [job for job in SEARCH["jobs"] if job["learning_rate"] == rows[moved]["learning_rate"]]}
    (row,) = run(root, tmp_path / "alone", search=alone, **MORE).values()
    assert row["job_id"] == moved and row["loss"] == pytest.approx(rows[moved]["loss"], rel=1e-4)
    told = [lines(there, moved, "metrics.jsonl") for there in (out, tmp_path / "alone")]
    for name in ("step", "tokens", "lr"):
        assert [line[name] for line in told[0]] == [line[name] for line in told[1]]
    np.testing.assert_allclose(*[[line["loss"] for line in one] for one in told], rtol=1e-4)


FAULTS = ["pause=error", "pause:2=error", "pause-journal=error", "rung=error", "rung:2=error", "step:9=error"]
FAULTS += [f"checkpoint-commit:{n}=error" for n in (1, 3)] + [f"export:{n}=error" for n in (2, 8)]
FAULTS += ["pause-journal:2=error,pause-journal:3=error,rung=error"]


@pytest.mark.parametrize("faults", FAULTS)
def test_what_is_lost_on_the_way_is_made_again_to_the_same_bits(calm, root, tmp_path, arm, faults):  # noqa: F811
    arm(faults)
    run(root, tmp_path / "run", "--checkpoint-every", "0.05", search=SEARCH, **MORE, **stop())
    assert events(tmp_path / "run", "error")  # it did happen
    assert differences(calm[2], results(tmp_path / "run")) == []


@pytest.mark.parametrize("step", [1, 6, 8, 13, 20])
def test_a_run_that_is_ended_and_resumed_comes_to_the_same_bits(calm, root, tmp_path, arm, step):  # noqa: F811
    out = tmp_path / "run"
    arm(f"step:{step}=term")
    with pytest.raises(FileNotFoundError, match="leaderboard"):  # there is none yet
        run(root, out, search=SEARCH, **MORE, **stop(), code=143)
    arm("")
    run(root, out, "--resume", search=SEARCH, **MORE, **stop())
    assert differences(calm[2], results(out)) == []


@pytest.mark.parametrize(("at", "step"), [(1, 2), (0, 4)])  # at rung 0 three jobs have left the pack by then
def test_a_pack_that_runs_out_of_memory_goes_on_from_the_rung(
    root,  # noqa: F811
    tmp_path,
    arm,  # noqa: F811
    monkeypatch,
    at,
    step,
):
    begun = []

    def oom(name, worker):
        if worker.journal.state.packs[name]["rung"] == at and name not in begun:
            begun.append(name)
            arm(f"step:{step}=oom")

    monkeypatch.setattr(PackRun, "__init__", told(PackRun.__init__, oom))
    rows = run(root, tmp_path / "run", search=SEARCH, **MORE, **stop("halving"))
    assert len(events(tmp_path / "run", "out_of_memory")) == len(begun) >= 1
    assert sorted(row["steps"] for row in rows.values()) == [2] * 6 + [6] * 2 + [18]
    for job_id, row in rows.items():
        steps = [line["step"] for line in lines(tmp_path / "run", job_id, "metrics.jsonl")]
        assert steps == list(range(1, row["steps"] + 1))
        assert len(lines(tmp_path / "run", job_id, "evals.jsonl")) == {2: 1, 6: 2, 18: 3}[row["steps"]]


def told(method, tell):
    """Return a PackRun's `__init__` that tells of the pack first."""

    def init(self, worker, name):
        tell(name, worker)
        method(self, worker, name)

    return init


def test_a_job_that_is_withdrawn_while_it_waits_keeps_what_it_came_to(root, tmp_path, monkeypatch):  # noqa: F811
    gone = []

    def plan(worker):
        if not gone:
            gone.extend(worker.journal.refresh().at_rung[:1])
            assert main(["stop", str(tmp_path / "run"), gone[0]]) == 0
        rung.plan_rung(worker)

    monkeypatch.setattr("plora_jax.engine.worker.plan_rung", plan)
    rows = run(root, tmp_path / "run", search=SEARCH, **MORE, **stop("halving"))
    row = rows[gone[0]]
    assert (row["status"], row["steps"], row["reason"]) == ("stopped", 2, "withdrawn")
    assert (tmp_path / "run" / row["adapter"] / "adapter_model.safetensors").exists()
    (said,) = lines(tmp_path / "run", gone[0], "evals.jsonl")
    assert row["score"] == said["score"]


def test_a_job_whose_state_was_damaged_begins_again(calm, root, tmp_path, monkeypatch):  # noqa: F811
    damaged, kept = [], []

    def plan(worker):
        rung.plan_rung(worker)
        kept.append({path.parts[-1] for path in (tmp_path / "run" / "waiting").glob("*/*")})
        for path in () if damaged else (tmp_path / "run" / "waiting").glob("*/2/*/"):
            damaged.append(path.parts[-3])
            shutil.rmtree(path)

    monkeypatch.setattr("plora_jax.engine.worker.plan_rung", plan)
    run(root, tmp_path / "run", search=SEARCH, **MORE, **stop())
    assert damaged and len(events(tmp_path / "run", "error")) == len(damaged)
    assert kept == [{"2"}, {"2"}, {"6"}]  # what nobody goes on from is deleted
    got = results(tmp_path / "run")
    assert differences(calm[2], got) == []


def test_rungs_that_nobody_asked_for_pause_nobody(root, tmp_path):  # noqa: F811
    """Compiling for every rung would cost more than this sweep: it is planned whole, and jobs go on at once."""
    rows = run(root, tmp_path / "run", search=SEARCH, **MORE, **stop(pause="auto"))
    assert {pack["rung"] for pack in state_of(tmp_path / "run").packs.values()} == {None}
    assert not events(tmp_path / "run", "paused") and any(row["steps"] == 18 for row in rows.values())
