"""What each rule would have kept and spent, told from the record of a finished sweep."""

import json
from pathlib import Path

import pytest

from plora_jax.cli import main as cli
from plora_jax.config.sweep import make_sweep, resolved
from plora_jax.errors import UserError
from plora_jax.search.early_stop import EarlyStop, Point, make_rule
from scripts.early_stop_sim import Recorded, compare, main, read_record, replay
from tests import tiny

NUMBERS = ("one", "two", "three")
FRACTIONS = (1 / 9, 1 / 3, 1.0)


def write_run(run: Path, finals: list[float], tokens: int = 900) -> None:
    """Write the record of jobs whose losses fall from 10 to their final one in a straight line, one after another."""
    rows = []
    for n, final in enumerate(finals):
        job_id = f"r8-lr0.0001-b8-{n:08x}"
        (run / "jobs" / job_id).mkdir(parents=True)
        lines = []
        for fraction in FRACTIONS:
            loss = 10 + fraction * (final - 10)
            lines.append({"step": round(9 * fraction), "fraction": fraction, "score": loss, "loss": loss})
            lines[-1] |= {"train_loss": loss, "rows": 5, "time": 100.0 + n}
        (run / "jobs" / job_id / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows.append({"job_id": job_id, "status": "completed", "score": final, "tokens": tokens})
    rows.sort(key=lambda row: row["score"])
    board = {"metric": "loss", "higher_is_better": False, "base": {"loss": 10.0}, "jobs": rows}
    (run / "leaderboard.json").write_text(json.dumps(board))
    (run / "sweep.yaml").write_text(resolved(make_sweep(model="m", data={"train": "a"})))


def test_all_at_once_by_hand(tmp_path: Path) -> None:
    """Nine jobs, η = 3: nine train 1/9, three 2/9 more, one 2/3 more: 1 + 2/3 + 2/3 of nine trainings."""
    write_run(tmp_path, [5, 1, 8, 2, 9, 3, 4, 6, 7])
    [none, asha] = compare(tmp_path, [EarlyStop(), EarlyStop("asha")], None)
    assert (none["tokens"], none["completed"], none["winner"]) == (1.0, 9, "completed")
    assert asha["tokens"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 9) and asha["completed"] == 1
    assert (asha["best"], asha["best_of_all"], asha["worse_by"]) == (1, 1, 0)
    assert asha["best_job"] == "r8-lr0.0001-b8-00000001" and len(asha["stopped"]) == 8


def test_one_slot_by_hand(tmp_path: Path) -> None:
    """One after another, best last: each is a new best, so none is stopped; best first: the others stop at 1/9."""
    write_run(tmp_path / "falling", [3, 2, 1])
    write_run(tmp_path / "rising", [1, 2, 3])
    [row] = compare(tmp_path / "falling", [EarlyStop("asha")], 1)
    assert (row["tokens"], row["completed"]) == (1.0, 3)
    [row] = compare(tmp_path / "rising", [EarlyStop("asha")], 1)
    assert row["tokens"] == pytest.approx((1 + 2 / 9) / 3) and row["completed"] == 1


def test_slots_run_side_by_side_and_are_refilled() -> None:
    """Two slots, jobs of 90, 180 and 90 tokens: the third begins at 90 and is judged at 1/3 after the second was."""
    losses = {"a": 3.0, "b": 1.0, "c": 2.0}
    record = {
        name: Recorded([Point(1, 1 / 3, loss, loss, 1.0), Point(3, 1.0, loss, loss, 1.0)], tokens)
        for (name, loss), tokens in zip(losses.items(), (90.0, 180.0, 90.0), strict=True)
    }
    rule = make_rule(EarlyStop("asha", grace_period=1 / 3), False)
    outcome = replay(rule, record, 2)
    assert set(outcome.stopped) == {"c"}  # a came first, b was better; c is second of three
    assert list(outcome.seen) == ["a", "b", "c"] and outcome.tokens == pytest.approx(90 + 180 + 30)
    assert outcome.best(rule, "best") == (1.0, "b")


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, [5, 1, 8, 2, 9, 3, 4, 6, 7])
    out = tmp_path / "out.json"
    assert main([str(run), "--slots", "3", "--rule", "{method: halving, cohort: 3}", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "9 jobs; best of all 1" and lines[2].endswith("method: halving, cohort: 3")
    [row] = json.loads(out.read_text())
    # of 5, 1 and 8 one passes 1/9; 2 and 9 take the free slots and are through before 3 comes, which is stopped;
    # of 4, 6 and 7, together again, one passes: four trainings and five ninths
    assert row["completed"] == 4 and row["tokens"] == pytest.approx((4 + 5 / 9) / 9)
    assert main([str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 10


def test_jobs_come_in_the_order_of_their_first_scores(tmp_path: Path) -> None:
    write_run(tmp_path, [3, 1, 2])
    record, _, keep = read_record(tmp_path)
    assert [job.points[-1].score for job in record.values()] == [3, 1, 2] and keep == "best"


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no leaderboard\.json"):
        read_record(tmp_path)
    write_run(tmp_path, [1, 2])
    for path in tmp_path.glob("jobs/*/evals.jsonl"):
        path.write_text(path.read_text().splitlines()[-1])
    with pytest.raises(UserError, match="no job was scored while it trained"):
        read_record(tmp_path)
    with pytest.raises(UserError, match=r"early_stop\.method: the text 'asah' is not known"):
        main([str(tmp_path), "--rule", "method: asah"])


@pytest.mark.slow
def test_the_replay_of_a_real_record_is_what_a_real_run_does(tmp_path: Path) -> None:
    """One sweep twice, whole and under ASHA: the same jobs stop at the same steps for the same reasons."""
    rows = [
        {"prompt": f"what is the {a} {b} ?", "completion": f" {'yes' if a == b else 'no'}"}
        for a in NUMBERS
        for b in NUMBERS
    ]
    tiny.write_model(tmp_path / "model")
    tiny.write_weights(tmp_path / "model")
    tiny.write_rows(tmp_path / "train.jsonl", rows)
    space = {"rank": [8], "learning_rate": [1e-4, 1e-3, 1e-2]}
    train = {"batch_size": 1, "epochs": 1}
    for name, how in (("whole", {"eval": {"every_steps": 1}}), ("asha", {"early_stop": {"method": "asha"}})):
        path = tiny.write_sweep(tmp_path, search=space, train=train, **how)
        assert cli(["sweep", str(path), "--out", str(tmp_path / name)]) == 0
    [row] = compare(tmp_path / "whole", [EarlyStop("asha")], None)
    board = json.loads((tmp_path / "asha" / "leaderboard.json").read_text())
    assert row["stopped"] == {
        job["job_id"]: job["reason"] for job in board["jobs"] if job["status"] == "stopped"
    }
    assert len(row["stopped"]) == 2 and row["best_job"] == board["jobs"][0]["job_id"]
    whole = json.loads((tmp_path / "whole" / "leaderboard.json").read_text())
    trained, in_all = (sum(job["steps"] for job in b["jobs"]) for b in (board, whole))
    assert in_all == 3 * 9 and row["tokens"] == pytest.approx(trained / in_all, rel=1e-6)
