"""The short form of scripts/kill_test.py: two workers, kill -9 at random moments and at fault points, the same bits."""

import pytest

from scripts.kill_test import differences, kill_at_points, kill_at_random, results, undisturbed, write_sweep

pytestmark = pytest.mark.long  # minutes on a busy machine


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Give a sweep, a compilation cache, and what the sweep comes to."""
    root = tmp_path_factory.mktemp("kill")
    sweep = write_sweep(root, "none", 90, targets=["q_proj"])
    return sweep, root / "cache", undisturbed(sweep, root / "want", root / "cache")


@pytest.mark.slow
def test_kills_at_fault_points_change_no_bit(killed, tmp_path):
    sweep, cache, want = killed
    points = ["checkpoint:1", "leaderboard.json:1", "step:20"]  # a worker twice, the driver once
    trial = kill_at_points(sweep, tmp_path / "run", cache, want, seed=0, points=points)
    assert sorted(kill.who for kill in trial.kills) == points and trial.starts == 2, trial
    assert trial.different == [], trial


@pytest.mark.long
def test_kills_at_random_moments_change_no_bit(killed, tmp_path):
    sweep, cache, want = killed
    trial = kill_at_random(sweep, tmp_path / "run", cache, want, seed=5, kills=3)
    assert len(trial.kills) == 3 and trial.different == [], trial


@pytest.mark.long
def test_kills_at_rungs_change_no_bit(tmp_path):
    """Two workers, jobs that wait at rungs: killed as one leaves its pack, and as what follows is planned."""
    sweep, cache = write_sweep(tmp_path, "rungs", 90, targets=["q_proj"]), tmp_path / "cache"
    want = undisturbed(sweep, tmp_path / "want", cache)
    points = ["pause:1", "pause-journal:2", "rung:1"]
    trial = kill_at_points(sweep, tmp_path / "run", cache, want, seed=0, points=points)
    assert {kill.who for kill in trial.kills} == set(points) and trial.different == [], trial


def test_the_comparison_sees_every_file(tmp_path):
    (tmp_path / "jobs/a/adapter").mkdir(parents=True)
    (tmp_path / "best").symlink_to("jobs/a/adapter")
    (tmp_path / "jobs/a/adapter/adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "jobs/a/evals.jsonl").write_text('{"step": 1, "time": 5}\n')
    (tmp_path / "jobs/a/metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "leaderboard.json").write_text("{}")
    want = results(tmp_path)
    (tmp_path / "jobs/a/evals.jsonl").write_text('{"step": 1, "time": 6}\n')
    assert differences(want, results(tmp_path)) == []
    for name, content in (
        ("jobs/a/adapter/adapter_model.safetensors", b"Weights"),
        ("jobs/a/evals.jsonl", b'{"step": 2, "time": 6}\n'),
        ("jobs/a/metrics.jsonl", b'{"step": 1}\n{"step": 2}\n'),
        ("jobs/a/job.json", b"{}"),
        ("leaderboard.json", b"{ }"),
    ):
        before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        (tmp_path / name).write_bytes(content)
        assert differences(want, results(tmp_path)) == [name]
        (tmp_path / name).write_bytes(before) if before is not None else (tmp_path / name).unlink()
    (tmp_path / "leaderboard.json").unlink()
    assert differences(want, results(tmp_path)) == ["leaderboard.json"]
