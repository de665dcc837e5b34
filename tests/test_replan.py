"""A sweep on a device that is slower than its cost model: what nobody has begun is planned again, or it is told of."""

import json

import pytest

from plora_jax.cli import main
from plora_jax.engine.journal import Journal
from tests import tiny
from tests.test_packrun import DATA, arm, events, root  # noqa: F401  fixtures

SEARCH = {"learning_rate": [0.01, 0.02], "rank": [4]}
MORE = "jobs:\n- {learning_rate: 0.05, rank: 4}\n- {learning_rate: 0.06, rank: 4}\n"
SLOW = "step:*=wait+15"


@pytest.fixture
def sweep(root, tmp_path, arm, monkeypatch):  # noqa: F811
    """Give what runs a sweep of two jobs, under faults; the first start ends early, and two jobs are added to it."""
    monkeypatch.setattr("plora_jax.engine.worker.STATUS_S", 0.0)
    monkeypatch.setattr("plora_jax.engine.driver.FEED_S", 0.0)
    out, more = tmp_path / "run", tmp_path / "more.yaml"
    more.write_text(MORE)
    path = tiny.write_sweep(root, data=DATA, search=SEARCH, train={"batch_size": 3, "epochs": 4})

    def start(faults, *options):
        arm(faults)
        code = main(["sweep", str(path), "--out", str(out), *options])
        if "--resume" not in options:
            assert code == 143 and main(["add", str(out), str(more)]) == 0
        return code

    return out, start


def packs(out):
    journal = Journal(out / "journal.jsonl")
    state = journal.refresh()
    journal.close()
    return {name: sorted(pack["jobs"]) for name, pack in state.packs.items()}


def board(out):
    return json.loads((out / "leaderboard.json").read_text())["jobs"]


def test_what_nobody_has_begun_is_planned_again_and_a_resumed_run_keeps_to_it(sweep, capsys):
    out, start = sweep
    start("step=term", "--no-reproducible")
    before = packs(out)
    assert list(before) == ["pack-001", "pack-002"]
    assert start(f"{SLOW},step:11=term", "--resume") == 143  # in the first pack, when its pace is known
    (event,) = events(out, "replanned")
    assert event["replaces"] == ["pack-002"] and event["factor"] > 1.1
    assert event["kept_s"] >= event["left_s"] > 0 and event["kept_s"] > event["planned_s"]
    assert "planned again" in capsys.readouterr().out
    after = packs(out)
    assert after == {"pack-001": before["pack-001"], "pack-003": before["pack-002"]}
    assert start("", "--resume") == 0
    assert list(packs(out))[:2] == list(after)
    assert sorted(row["job_id"] for row in board(out)) == sorted(before["pack-001"] + before["pack-002"])
    assert all(row["status"] == "completed" and row["steps"] == 12 for row in board(out))


def test_a_reproducible_run_tells_of_the_drift_alone(sweep):
    out, start = sweep
    start("step=term")
    before = packs(out)
    assert start(SLOW, "--resume") == 0
    assert packs(out) == before and events(out, "replanned") == []
    told = events(out, "drift")
    assert 1 <= len(told) <= 2 and told[0]["factor"] > 1.1  # at most once for each pack
    assert [row["status"] for row in board(out)] == ["completed"] * 4
