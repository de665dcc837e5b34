"""A run read from outside: whole, running, cut off, half-written."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from plora_jax.errors import UserError
from plora_jax.report.runfiles import RunFiles, number, parse_lines
from plora_jax.report.runview import RunView, curve, read_view
from plora_jax.report.spans import fold
from tests.made_run import RUNGS, START, Writer, make_jobs, make_run, write_lines

LATER = START + 1e6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("view") / "run", count=40, steps=60)


def view_of(run: Path, now: float = LATER) -> RunView:
    return read_view(RunFiles(run), now)


def test_a_finished_run_is_what_its_files_say(run: Path) -> None:
    view, board = view_of(run), json.loads((run / "leaderboard.json").read_text())
    assert view.state == "finished" and view.metric == "choice_accuracy" and view.higher_is_better
    assert [job.job_id for job in view.jobs] == [row["job_id"] for row in board["jobs"]]
    for job, row in zip(view.jobs, board["jobs"], strict=True):
        for name in ("status", "score", "loss", "steps", "tokens", "reason", "adapter"):
            assert getattr(job, name) == row[name]
        assert job.fields == {name: row[name] for name in job.fields} and len(job.fields) > 20
    assert view.varied() == ["learning_rate", "rank", "alpha", "batch_size", "scheduler"]
    assert {job.status for job in view.jobs} == {"completed", "stopped", "failed"}
    assert view.base["rows"] == 400 and view.test["best"]["job_id"] == view.jobs[0].job_id
    for job in view.of_status("stopped"):
        assert min(abs(job.fraction - rung) for rung in RUNGS) < 1 / 60  # type: ignore[operator]


def test_without_a_leaderboard_the_jobs_stand_in_the_same_order(run: Path, tmp_path: Path) -> None:
    before = view_of(run)
    half = shutil.copytree(run, tmp_path / "half")
    for name in ("leaderboard.json", "plan.json"):
        (half / name).unlink()
    shutil.rmtree(half / "workers")
    after = view_of(half)
    assert [(job.job_id, job.score, job.fields) for job in after.jobs] == [
        (job.job_id, job.score, job.fields) for job in before.jobs
    ]


def test_a_running_sweep_shows_what_it_has(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", count=40, steps=60, until=300.0, asha=False)
    view = view_of(run, START + 300.0)
    assert view.state == "running"  # its files are new: it may run on another machine
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    placed, ended = (
        {line["job_id"] for line in lines if line["kind"] == kind} for kind in ("place", "ended")
    )
    assert {job.job_id for job in view.of_status("running")} == placed - ended and len(placed) >= 10
    assert len(view.of_status("waiting")) == 40 - len(placed) and len(view.jobs) == 40
    job = view.of_status("running")[0]
    whole = (run / "jobs" / job.job_id / "metrics.jsonl").read_text().splitlines()[:-1]
    assert job.steps == json.loads(whole[-1])["step"] and job.tokens == sum(
        json.loads(x)["tokens"] for x in whole
    )
    assert job.fraction == pytest.approx(job.steps / 60) and job.score is not None
    assert view.clock(view.last) == 300.0

    for path in [*run.rglob("*")]:
        os.utime(path, (START, START))
    assert view_of(run, START + 300.0).state == "stopped"
    assert len(view_of(run, START + 300.0).of_status("unfinished")) == len(placed - ended)


def test_a_held_lock_says_that_the_run_goes_on(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    with open(copy / ".lock", "w") as lock:
        with (copy / "events.jsonl").open("a") as events:
            events.write(json.dumps({"time": START + 1e5, "event": "started"}) + "\n")
        os.utime(copy / "events.jsonl", (START, START))
        assert read_view(RunFiles(copy), time.time() + 1e5).state == "stopped"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_view(RunFiles(copy), time.time() + 1e5).state == "running"
        code = "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
        held = subprocess.run([sys.executable, "-c", code, copy / ".lock"], capture_output=True)
        assert b"BlockingIOError" in held.stderr  # reading left the lock where it was
    assert read_view(RunFiles(copy), time.time() + 1e5).state == "stopped"


def test_an_interrupted_run_has_stopped_as_soon_as_it_says_so(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    now = time.time()
    with (copy / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": now, "event": "started"}) + "\n")
        events.flush()
        assert read_view(RunFiles(copy), now).state == "running"
        events.write(json.dumps({"time": now, "event": "interrupted", "signal": 2}) + "\n")
        events.flush()
    assert read_view(RunFiles(copy), now).state == "stopped"


def test_who_held_which_pack_and_which_job_was_where(run: Path) -> None:
    view = view_of(run)
    first = next(span for span in view.spans if span.how == "lost")
    again = next(span for span in view.spans if span.pack == first.pack and span.attempt == 2)
    assert first.cause.startswith("killed by signal 9") and again.start == pytest.approx(first.end + 45.0)
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    placed, ended = (
        {line["job_id"]: line["time"] - START for line in journal if line["kind"] == kind}
        for kind in ("place", "ended")
    )
    assert {bar.job_id for bar in view.bars} == set(placed)
    for name, start in placed.items():
        bars = [bar for bar in view.bars if bar.job_id == name]
        nobody = max(min(ended[name], again.start) - max(start, first.end), 0.0)  # held its pack then
        gap = nobody if bars[0].pack == first.pack else 0.0
        assert sum(bar.end - bar.start for bar in bars) == pytest.approx(ended[name] - start - gap, abs=0.01)
    assert any(sum(bar.job_id == name for bar in view.bars) == 2 for name in placed)
    slots: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for bar in view.bars:
        slots.setdefault((bar.pack, bar.slot), []).append((bar.start, bar.end))
    for spans in slots.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def line(when: float, what: str, **fields: object) -> dict[str, object]:
    return {"time": when, "kind": what, **fields}


def test_claims_that_end_in_every_way() -> None:
    log = [
        line(0, "claim", pack="p", worker="0"),
        line(10, "yielded", pack="p"),
        line(12, "claim", pack="p", worker="1"),
        line(20, "worker_lost", worker="1", cause="killed"),
        line(21, "lost", pack="p", cause="its worker was killed"),
        line(22, "claim", pack="p", worker="0"),
        line(30, "limit", pack="p"),
        line(31, "claim", pack="p", worker="0"),
        line(40, "settings"),
        line(41, "claim", pack="p", worker="0"),
        line(50, "done", pack="p"),
        line(51, "claim", pack="q", worker="0"),
    ]
    spans, bars = fold(log, lambda when: when, 60.0)
    assert [(s.worker, s.attempt, s.start, s.end, s.how, s.cause) for s in spans] == [
        ("0", 1, 0, 10, "done", ""),
        ("1", 1, 12, 20, "lost", "killed"),
        ("0", 2, 22, 30, "lost", "out of device memory"),
        ("0", 3, 31, 40, "lost", "the run was cut off"),
        ("0", 4, 41, 50, "done", ""),
        ("0", 1, 51, 60, "open", ""),
    ]
    assert bars == []


def test_a_pack_that_shrinks_or_begins_again_moves_its_jobs() -> None:
    log = [
        line(0, "claim", pack="p", worker="0"),
        *[line(1, "place", pack="p", at=0, slot=slot, job_id=job) for slot, job in enumerate("abcd")],
        line(5, "ended", job_id="a", status="completed"),
        line(6, "ended", job_id="c", status="failed"),
        line(7, "shrink", pack="p", at=9, keep=[1, 3], slots=2),
        line(8, "ended", job_id="b", status="completed"),
        line(10, "limit", pack="p"),
        line(10, "claim", pack="p", worker="0"),
        line(11, "place", pack="p", at=0, slot=0, job_id="d"),
    ]
    _, bars = fold(log, lambda when: when, 20.0)
    assert sorted((b.job_id, b.slot, b.start, b.end) for b in bars) == [
        ("a", 0, 1, 5), ("b", 0, 7, 8), ("b", 1, 1, 7), ("c", 2, 1, 6), ("d", 0, 11, 20), ("d", 1, 7, 10),
        ("d", 3, 1, 7),
    ]  # fmt: skip


def test_a_pause_before_a_restart_is_cut_out_of_the_clock(tmp_path: Path) -> None:
    log = Writer(tmp_path)
    for when, what in ((0, "started"), (100, "claim"), (5_000, "started"), (5_050, "finished")):
        log.event(when, what)
    log.write()
    view = view_of(tmp_path)
    assert view.pauses == [(START + 100, START + 5_000)]
    assert [view.clock(START + t) for t in (0, 50, 100, 2_000, 5_000, 5_050)] == [0, 50, 100, 100, 100, 150]


def test_what_grew_is_read_and_what_is_torn_waits(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    path, files = tmp_path / "jobs" / "a" / "metrics.jsonl", RunFiles(tmp_path)
    line = {"step": 1, "loss": 2.0, "tokens": 5}
    path.write_text(json.dumps(line) + '\n{"step": 2, "lo')
    assert curve(files, "a")["step"].tolist() == [1]
    with path.open("a") as file:
        file.write('ss": 1.5, "tokens": 5}\n')
    assert curve(files, "a")["loss"].tolist() == [2.0, 1.5]
    with path.open("a") as file:  # a pack that went back to its checkpoint does step 2 again
        file.write('{"step": 2, "loss": 1.25, "tokens": 5}\nnonsense\n[3]\n{"step": 3, "loss": null}\n')
    columns = curve(files, "a")
    assert columns["step"].tolist() == [1, 2, 3] and columns["loss"][:2].tolist() == [2.0, 1.25]
    assert np.isnan(columns["loss"][2]) and np.isnan(columns["tokens"][2])
    path.unlink()
    path.write_text(json.dumps(line) + "\n")
    assert curve(files, "a")["step"].tolist() == [1]


def test_the_version_changes_with_every_file_that_is_shown(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    files, seen = RunFiles(copy), set()
    job = next((copy / "jobs").iterdir())
    for path in (
        copy / "events.jsonl",
        copy / "journal.jsonl",
        job / "metrics.jsonl",
        copy / "workers" / "0.json",
    ):
        before = files.version()
        assert files.version() == before
        with path.open("a") as file:
            file.write(" \n")
        seen |= {before, files.version()}
    assert len(seen) == 5


def test_values_of_any_kind_do_no_harm(tmp_path: Path) -> None:
    assert [number(x) for x in (1, 2.5, True, "3", None, float("nan"), float("inf"), 10**400)] == [1, 2.5] + [
        None
    ] * 6
    assert parse_lines(b'{"a": 1}\n\xff\xfe\n[1]\n' + b"[" * 100_000 + b'\n{"b": 2}\n') == [
        {"a": 1},
        {"b": 2},
    ]
    wild = [None, 3, "x", [1], {"a": [1]}, float("nan"), -1, 10**400, "../../../etc"]
    write_lines_freely(tmp_path / "journal.jsonl", "kind", wild)
    write_lines_freely(tmp_path / "events.jsonl", "event", wild)
    for at in range(len(wild)):
        for shift, name in enumerate(("plan.json", "leaderboard.json", "base.json", "test.json")):
            (tmp_path / name).write_text(json.dumps(wild[(at + shift) % len(wild)]))
        view_of(tmp_path)


def write_lines_freely(path: Path, name: str, wild: list[object]) -> None:
    kinds = (
        "started",
        "finished",
        "jobs",
        "claim",
        "place",
        "ended",
        "lost",
        "done",
        "score",
        "sample",
        "limit",
    )
    fields = (
        "time",
        "job",
        "jobs",
        "pack",
        "slot",
        "worker",
        "attempt",
        "status",
        "step",
        "fraction",
        "tokens",
    )
    lines = [{name: kind, **dict.fromkeys(fields, value)} for kind in kinds for value in wild]
    lines += [
        {name: kind, "time": START, "job": "a", "pack": "p", field: v}
        for kind in kinds
        for field in fields
        for v in wild
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_name_of_the_run_leads_nowhere_else(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "jobs"
    (run / "jobs").mkdir(parents=True)
    other.mkdir()
    write_lines(other / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    (other / "job.json").write_text('{"status": "completed"}')
    files = RunFiles(run)
    for name in ("../jobs", "../../jobs", str(other), "x/../../../jobs", ".", "\0"):
        assert not len(curve(files, name)["step"]) and files.value(f"jobs/{name}/job.json") is None
        assert files.mapping(f"{name}/job.json") == {}


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        view_of(tmp_path)
    with pytest.raises(UserError, match="there is no such directory"):
        view_of(tmp_path / "none")
    write_lines(tmp_path / "events.jsonl", [])
    assert view_of(tmp_path).jobs == [] and len(make_jobs(3)) == 3
