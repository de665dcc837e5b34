"""plora watch: what the terminal is told of runs that run, have ended, were cut off or are half there."""

import io
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from rich.console import Console

from plora_jax.cli import main
from plora_jax.report import watch as module
from plora_jax.report.runfiles import RunFiles
from plora_jax.report.runview import RunView, read_view
from plora_jax.report.watch import done_share, left, plain, rate, snapshot, summary, watch
from tests.made_run import START, Writer, make_run
from tests.test_report import EVIL, hostile


def shown(view: RunView, height: int = 60, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, emoji=False).print(snapshot(view, height))
    return out.getvalue()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("watch") / "run", count=20, steps=40, until=600.0)


def at_600(run: Path) -> RunView:
    for path in run.rglob("*"):
        os.utime(path, (START + 600, START + 600))
    return read_view(RunFiles(run), START + 600)


def test_a_running_sweep(running: Path) -> None:
    view = at_600(running)
    text, line = shown(view), summary(view)
    records = [json.loads(path.read_text()) for path in running.glob("jobs/*/job.json")]
    ended = len(records)
    assert view.state == "running" and 0 < ended < 20
    parts = [min(job.fraction or 0.0, 1.0) for job in view.of_status("running")]
    assert done_share(view) == pytest.approx((ended + sum(parts)) / 20)
    assert left(view) == pytest.approx(600 * (1 - done_share(view)) / done_share(view))
    assert rate(view) == 2 * 19_400.0 and "38,800 tokens/s" in text and "38,800 tokens/s" in line
    for status in ("stopped", "running", "waiting"):
        assert f"{len(view.of_status(status))} {status}" in text
    assert "61.0/72 GiB" in text and "212 ms" in text
    best = next(job for job in view.jobs if job.score is not None)
    assert f"{best.score:.3f}" in text and best.job_id in text and line.endswith(best.job_id)
    assert "base model" in text and "0.532" in text and "not in the top third" in text


def test_one_that_was_cut_off_says_so(running: Path) -> None:
    for path in running.rglob("*"):
        os.utime(path, (START, START))
    view = read_view(RunFiles(running), START + 1e6)
    assert view.state == "stopped" and "go on with plora sweep … --resume" in shown(view)
    assert left(view) is None and rate(view) == 0.0


def test_small_terminals_are_not_overrun(running: Path) -> None:
    view = at_600(running)
    for height in (24, 30, 40):
        assert shown(view, height).count("\n") < height


def test_finished_half_written_and_empty_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", count=8, steps=20)
    assert "finished" in shown(read_view(RunFiles(run)))
    for name in ("leaderboard.json", "plan.json", "journal.jsonl", "base.json"):
        (run / name).write_text('{"torn": ')
        shown(read_view(RunFiles(run)))
    shutil.rmtree(run / "jobs")
    shutil.rmtree(run / "workers")
    shown(read_view(RunFiles(run)))
    empty = tmp_path / "empty"
    empty.mkdir()
    Writer(empty).write()
    assert "no job is known yet" in shown(read_view(RunFiles(empty)))


def test_names_can_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    view = read_view(RunFiles(hostile(tmp_path / "run")))
    view.jobs[0].job_id = view.name = "[bold red]\x1b]0;evil\x07\x9b2J\u202egpj" + EVIL
    text = shown(view) + summary(view)
    assert "\x1b" not in text and "\x07" not in text and "\x9b" not in text and "\u202e" not in text
    assert "[bold red]" in text  # shown, not obeyed
    assert plain("a\nb\tc" + "x" * 100, 10) == "a\ufffdb\ufffdcxxxx…"


def test_once_and_the_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", count=4, steps=20)
    assert main(["watch", str(run), "--once"]) == 0
    assert "4 of" not in capsys.readouterr().out
    assert main(["watch", str(run)]) == 0  # it has ended: nothing to wait for
    assert capsys.readouterr().out.startswith("finished: 100% of 4 jobs")
    (run / "events.jsonl").write_text("")
    (run / "leaderboard.json").unlink()
    for path in run.rglob("*"):
        os.utime(path, (START, START))
    assert main(["watch", str(run)]) == 1
    assert capsys.readouterr().out.startswith("stopped: ")
    assert main(["watch", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_it_follows_a_run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.05)
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.05)
    whole = make_run(tmp_path / "whole", count=6, steps=20)
    run = make_run(tmp_path / "run", count=6, steps=20, until=400.0)
    assert read_view(RunFiles(run)).state == "running"
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140, height=50, emoji=False)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(watch(run, console=console)))
    thread.start()
    thread.join(0.4)
    assert thread.is_alive()
    (run / "leaderboard.json").write_bytes((whole / "leaderboard.json").read_bytes())
    with (run / "events.jsonl").open("a") as file:
        file.write((whole / "events.jsonl").read_text().splitlines()[-1] + "\n")
    thread.join(20)
    assert codes == [0] and "running" in out.getvalue() and "finished" in out.getvalue()
    if not terminal:
        assert "\x1b" not in out.getvalue()
        assert all(line.startswith(("running: ", "finished: ")) for line in out.getvalue().splitlines())
