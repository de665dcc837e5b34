"""Sweeps that are planned rung by rung: jobs wait at rungs, go on in other packs, and lose nothing on the way."""

import json

import pytest

from plora_jax.engine.journal import Journal
from tests.test_packrun import arm, events, lines, root, run  # noqa: F401  fixtures

RATES = [1.0, 3.0, 0.05, 2.0, 0.02, 0.03, 0.5, 0.01, 0.1]
SEARCH = {"jobs": [{"learning_rate": rate, "rank": 4 if n % 2 else 12} for n, rate in enumerate(RATES)]}
MORE = {"train": {"epochs": 6, "max_grad_norm": 0, "slots": 4, "keep": "last"}}


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
    for name, pack in state.packs.items():
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
