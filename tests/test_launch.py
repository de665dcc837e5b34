"""Workers that die are told of and started again, a while later and not for ever; all end when the driver asks."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from planner.devices import cpu_device
from plora_jax.engine import driver as engine
from plora_jax.engine.driver import _drive, _Watch
from plora_jax.engine.journal import BASE, TEST, Journal
from plora_jax.engine.progress import Progress
from plora_jax.engine.rundir import open_run
from plora_jax.engine.trackers import Feed
from plora_jax.launch.pool import Ended, Pool, Restarts
from plora_jax.launch.process import Exit, Group, WorkerProcess
from tests.test_process import STANDIN, gone, status, wait_for

SPAWN = partial(WorkerProcess, module=STANDIN)
QUICK = partial(Restarts, first_s=0.05)


def pids(run: Path, worker: str = "0") -> list[int]:
    path = run / f"begun-{worker}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def watch_of(run, journal, progress):
    replanner: Any = SimpleNamespace(look=lambda workers: None)
    return _Watch(run, journal, progress, Feed(run, {}, (), "", print), {}, replanner)


def test_workers_that_are_done_leave(tmp_path):
    pool = Pool(SPAWN)
    pool.start(tmp_path, [Group("0"), Group("1")])
    first, second = status(tmp_path, "0"), status(tmp_path, "1")
    assert first["pid"] != second["pid"] and pool.poll() == [] and pool.alive() == ["0", "1"]
    (tmp_path / "finish").touch()
    ended: list[Ended] = []
    wait_for(lambda: ended.extend(pool.poll()) or len(ended) == 2)
    assert {(end.worker, end.cause, end.left) for end in ended} == {("0", "", True), ("1", "", True)}
    assert pool.alive() == []


def test_a_killed_worker_is_started_again(tmp_path):
    pool = Pool(SPAWN, restarts=QUICK)
    pool.start(tmp_path, [Group("0"), Group("1")])
    killed = status(tmp_path, "0")["pid"]
    other = status(tmp_path, "1")["pid"]
    os.kill(killed, signal.SIGKILL)
    [end] = wait_for(pool.poll)
    assert (end.worker, end.cause[:17], end.left) == ("0", "killed by SIGKILL", False)
    assert end.tail == "worker 0 is working" and pool.alive() == ["0", "1"]
    wait_for(lambda: pool.poll() == [] and len(pids(tmp_path)) == 2)
    assert pids(tmp_path, "1") == [other]
    pool.stop()
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_a_worker_that_always_fails_leaves_with_its_cause(tmp_path):
    (tmp_path / "mode").write_text("crash")
    pool = Pool(SPAWN, restarts=partial(QUICK, limit=2))
    pool.start(tmp_path, [Group("0")])
    ended: list[Ended] = []
    wait_for(lambda: ended.extend(pool.poll()) or not pool.alive())
    assert [end.left for end in ended] == [False, False, True] and len(pids(tmp_path)) == 3
    assert {end.cause for end in ended} == {"exit code 1: OSError: [Errno 28] No space left on device"}


def test_a_worker_that_never_starts_is_told_of_once_and_the_others_go_on(tmp_path):
    def spawn(run: Path, group: Group) -> WorkerProcess:
        (run / "mode").write_text("stillborn" if group.worker == "1" else "work")
        process = SPAWN(run, group)
        wait_for(lambda: process.poll() or pids(run, group.worker))
        return process

    pool = Pool(spawn, restarts=QUICK)
    pool.start(tmp_path, [Group("0"), Group("1")])
    ended: list[Ended] = []
    wait_for(lambda: ended.extend(pool.poll()) or len(pool.alive()) == 1)
    [end] = ended
    assert end.worker == "1" and end.left and "Unable to initialize backend 'cuda'" in end.cause
    assert (tmp_path / "workers" / "1.log").read_text().count("Traceback") == 3
    assert pool.alive() == ["0"] and pool.poll() == []
    pool.stop()


def test_a_lost_device_leaves_at_once(tmp_path):
    pool = Pool(SPAWN, lost=lambda group: f"the driver no longer finds {group.devices[0]}")
    pool.start(tmp_path, [Group("0", 1, (f"test-lost-{os.getpid()}",))])
    os.kill(status(tmp_path)["pid"], signal.SIGABRT)
    [end] = wait_for(pool.poll)
    assert end.left and end.cause.endswith(f"; the driver no longer finds test-lost-{os.getpid()}")
    assert pool.alive() == []
    Path(f"/tmp/plora-test-lost-{os.getpid()}.lock").unlink()


def test_the_waits_double_and_a_long_life_is_forgiven():
    restarts = Restarts(limit=4, first_s=1, most_s=5, steady_s=100)
    assert [restarts.next(True, 1) for _ in range(5)] == [1, 2, 4, 5, None]
    restarts = Restarts(limit=4, first_s=1, steady_s=100)
    assert [restarts.next(True, life) for life in (1, 1, 100, 1, 1, 1, 1)] == [1, 2, 1, 2, 4, 8, None]
    restarts = Restarts(starts=2)
    assert [restarts.next(started, 1) for started in (False, False, True, False, False)] == [1, 2, 4, 8, 16]
    assert restarts.next(False, 1) is None


def test_a_worker_that_will_not_end_is_ended(tmp_path):
    (tmp_path / "mode").write_text("deaf")
    pool = Pool(SPAWN, grace_s=0.3)
    pool.start(tmp_path, [Group("0")])
    pid = status(tmp_path)["pid"]
    begun = time.monotonic()
    pool.stop()
    wait_for(lambda: gone(pid), 30)
    assert 0.3 <= time.monotonic() - begun < 30


DRIVER = """
import sys, time
from functools import partial
from pathlib import Path
from plora_jax import cli
from plora_jax.launch.pool import Pool
from plora_jax.launch.process import Group, WorkerProcess

def drive(args):
    pool = Pool(partial(WorkerProcess, module="tests.standin"), grace_s=20)
    pool.start(run, [Group("0"), Group("1")])
    try:
        while True:
            pool.poll()
            time.sleep(0.05)
    finally:
        pool.stop()

run, sys.argv = Path(sys.argv[1]), ["plora", "doctor"]
cli._doctor = drive
cli.command()
"""


def driver(run: Path) -> subprocess.Popen[bytes]:
    """Start the command line with a driver in place of a command, as a shell starts a job."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(run)], process_group=0)
    status(run, "0")
    status(run, "1")
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_workers_save_when_the_driver_is_asked_to_end(tmp_path, number, code):
    """Ctrl-C goes to all processes of the terminal's job: the workers hear of it once, from the driver."""
    process = driver(tmp_path)
    os.killpg(process.pid, number)
    assert process.wait(20) == code
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert not list(tmp_path.glob("interrupted-*"))
    assert all(gone(pid) for worker in "01" for pid in pids(tmp_path, worker))


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    (tmp_path / "mode").write_text("deaf")
    process = driver(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.5)  # the command line repeats a signal after a second: that is no second Ctrl-C
    assert process.poll() is None and not gone(pids(tmp_path)[0])
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(5) == 130
    assert all(gone(pid) for worker in "01" for pid in pids(tmp_path, worker))


def test_the_driver_does_not_wait_for_a_worker_that_no_work_is_left_for(tmp_path):
    """As one whose node was lost, and that no other node has room for."""

    class Waiting:
        ended: Exit | None = None

        def __init__(self, run, group):
            pass

        def poll(self):
            return self.ended

        def terminate(self):
            self.ended = Exit("", "", started=False)

        kill = terminate

    console = Console(file=io.StringIO())
    with open_run(tmp_path / "run", resume=False) as run, Progress(console, 1.0) as progress:
        journal = Journal(run.path / "journal.jsonl")
        journal.append("settings", settings={"devices": asdict(cpu_device(2**30))})
        for name in (BASE, TEST):
            journal.append("done", pack=name)
        watch = watch_of(run, journal, progress)
        pool = Pool(Waiting)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "END_S", 0.5)
            _drive(pool, [Group("0")], run, console, watch)
        assert pool.alive() == []


def test_the_report_is_written_while_the_run_goes_on_when_there_is_news(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "REPORT_S", 0.0)
    console = Console(file=io.StringIO())
    with open_run(tmp_path / "run", resume=False) as run, Progress(console, 1.0) as progress:
        watch, page = watch_of(run, Journal(run.path / "journal.jsonl"), progress), run.path / "report.html"

        def written(tokens):
            watch.report_at = min(watch.report_at, time.monotonic())
            watch.update("0", {"time": time.time(), "pack": "pack-001", "tokens": tokens, "jobs": {}})
            return page.stat().st_mtime_ns if page.exists() else None

        assert written(0) is None
        first = written(100)
        assert first and "<html" in page.read_text()
        assert written(100) == first and (second := written(200)) > first
        watch.report_at = time.monotonic() + 60  # not time yet
        watch.update("0", {"time": time.time(), "pack": "pack-001", "tokens": 300, "jobs": {}})
        assert page.stat().st_mtime_ns == second

        def broken(path):
            raise ValueError("a fault of the page")

        monkeypatch.setattr(engine, "write_report", broken)
        written(400)
    assert '"cause": "report.html: a fault of the page"' in (tmp_path / "run/events.jsonl").read_text()
