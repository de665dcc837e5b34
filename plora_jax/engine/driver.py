"""Drive a sweep: read the data, plan, set workers to it, watch them, rank and report."""

import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import planner
from planner import render_plan
from plora_jax.config.space import EXCLUDES, ONLY_WITH
from plora_jax.config.sweep import Sweep, make_sweep, resolved, unsupported
from plora_jax.config.yamlfile import parse_yaml
from plora_jax.engine.handover import ROWS, hand_over, rows_bytes
from plora_jax.engine.inputs import input_digests
from plora_jax.engine.journal import Journal
from plora_jax.engine.progress import Progress, make_console, say
from plora_jax.engine.replan import Replanner
from plora_jax.engine.rundir import RunDirectory, check_unused, open_run, write_atomic, write_json
from plora_jax.engine.rung import FOLDER
from plora_jax.engine.task import Task, read_task, start_adapters
from plora_jax.engine.trackers import Feed, check_trackers
from plora_jax.engine.worker import Preempted, Worker
from plora_jax.errors import UserError
from plora_jax.evaluation.leaderboard import Result, print_leaderboard, rank, read_results, write_leaderboard
from plora_jax.evaluation.scorer import Score
from plora_jax.jobs import Job
from plora_jax.launch.pool import Launcher
from plora_jax.launch.process import Group
from plora_jax.launch.site import LaunchOptions, Site, find_site
from plora_jax.machine import versions
from plora_jax.models.find import load_config, load_tokenizer
from plora_jax.models.load import Base, check_weights, load_base
from plora_jax.planning import check_disk, disk_bytes, first_packs, plan_jobs, trained_rows
from plora_jax.report.write import write_report
from plora_jax.search.drawing import corner_jobs
from plora_jax.training.recompute import device_bytes

# Forward passes that a trained token costs: its own, and a backward pass to the inputs alone.
TRAINING_WORK = 2.0
FEED_S = 2.0  # seconds between two looks at what trackers get
END_S = 5.0  # seconds for workers to end once nothing is left to do
REPORT_S = 30.0  # seconds between two writings of report.html, at least; of what is new
SAMPLE_S = 10.0  # seconds between two lines of a worker's measurements in events.jsonl
UNSAMPLED = ("time", "pid", "host", "jobs", "phase")


def run_sweep(
    sweep: Sweep,
    jobs: Sequence[Job],
    out: Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    base: Base | None = None,
    launch: LaunchOptions | None = None,
    reproducible: bool | None = None,
    checkpoint_s: float = 120.0,
    console: Console | None = None,
) -> int:
    """Run a sweep into the directory `out` and return the exit code: 0 done, 1 some jobs failed.

    Whatever is wrong with the input is found before `out` is made. With `resume`, what an earlier run finished is
    kept and the rest goes on from its checkpoints. `dry_run` shows the plan and writes nothing.

    Args:
      base: the model, when it is loaded already; everything then runs in this process.
      launch: where the workers run; by default a process for each GPU, and this process where there is one CPU.
      reproducible: decide by step counts and scores alone, so that a run that was interrupted ends with the same
        bits as one that was not; by default on a CPU.
      checkpoint_s: seconds between two checkpoints of a pack.

    Raises:
      UserError: the model, a job, the data or the directory cannot be used.
    """
    if missing := unsupported(sweep):
        raise UserError("; ".join(missing))
    console = console or make_console()
    check_unused(out, resume)
    check_trackers(sweep.log.to)
    site = _site(sweep, launch, base)
    if site.note:
        say(console, site.note)
    config = base.config if base else load_config(sweep.model)
    tokenizer = (base and base.tokenizer) or load_tokenizer(sweep.model)
    jobs, starts = start_adapters(sweep, config, [*jobs, *_added(out, jobs)] if resume else jobs)
    corners = corner_jobs(sweep) if sweep.search.is_drawn else []
    task = replace(read_task(sweep, [*jobs, *corners], tokenizer, config.vocab_size, console), starts=starts)
    scored = {job.job_id: task.eval.tokens for job in jobs}
    left = _unfinished(out, jobs) if resume else jobs
    plan = plan_jobs(sweep, config, left, task.train, scored, site.devices, corners=corners) if left else None
    if plan:
        say(console, render_plan(plan))
        check_disk(out, disk_bytes(config, plan) + (rows_bytes(task) if site.launcher else 0))
    if dry_run:
        return 0
    if site.launcher:
        check_weights(sweep.model)
    else:
        base = base or load_base(sweep.model, precision=sweep.precision.base)  # type: ignore[arg-type]
    with open_run(out, resume) as run:
        _begin(run, sweep, task.digests | input_digests(sweep, jobs))
        journal = Journal(run.path / "journal.jsonl")
        on_cpu = site.devices.parts[0].spec.name == "cpu"
        by_steps = on_cpu if reproducible is None else reproducible
        scope = "pack" if by_steps and len(site.groups) > 1 else "sweep"
        settings = {"scope": scope, "reproducible": by_steps, "checkpoint_s": checkpoint_s}
        settings |= {"devices": asdict(site.devices)}
        if site.launcher:
            hand_over(run.path, task)
        _write_start(run, journal, left, corners, plan, settings)
        work = {job.job_id: _work(job, task, scored[job.job_id]) for job in jobs}
        feed = Feed(run, journal.state.jobs, sweep.log.to, sweep.log.project, partial(say, console))
        replanner = Replanner(run, journal, sweep, config, task, console)
        with Progress(console, sum(work.values())) as progress, closing(feed):
            watch = _Watch(run, journal, progress, feed, work, replanner)
            if journal.refresh().finished:
                pass
            elif site.launcher is None:
                _work_here(run, base, task, console, watch)
            else:
                _drive(site.launcher, _with_work(site, journal), run, console, watch)
        if not journal.refresh().finished:
            say(
                console,
                f"no worker is left, and the sweep is not finished; plora sweep … --out {out} --resume goes on",
            )
            journal.close()
            return 1
        code = _finish(run, journal, sweep, console, out)
        journal.close()
        return code


def _site(sweep: Sweep, launch: LaunchOptions | None, base: Base | None) -> Site:
    """Find what the sweep runs on; a single CPU worker is this process itself, unless a launcher is asked for."""
    if base is not None:
        return find_site(LaunchOptions("inline"), sweep.devices, held=device_bytes())
    site = find_site(launch or LaunchOptions(), sweep.devices)
    alone = launch is None and site.devices.parts[0].spec.name == "cpu" and len(site.groups) == 1
    return site._replace(launcher=None) if alone else site


def _added(out: Path, jobs: Sequence[Job]) -> list[Job]:
    """List the jobs that were added to an earlier run beside those of its file."""
    if not (out / "journal.jsonl").exists():
        return []
    journal, mine = Journal(out / "journal.jsonl"), {job.job_id for job in jobs}
    added = [Job.from_dict(job) for job_id, job in journal.refresh().jobs.items() if job_id not in mine]
    journal.close()
    return added


def _unfinished(out: Path, jobs: Sequence[Job]) -> list[Job]:
    """List the jobs that an earlier run neither finished nor still has in a pack or at a rung."""
    if not (out / "journal.jsonl").exists():
        return list(jobs)
    journal, run = Journal(out / "journal.jsonl"), RunDirectory(out)
    state = journal.refresh()
    whole = {result.job.job_id for result in read_results(run, state.jobs)} | state.withdrawn
    open_jobs = {
        place["job_id"]
        for name, pack in state.packs.items()
        if name not in state.done
        for place in pack["assign"]
    }
    journal.close()
    drawn = any("corners" in pack for pack in state.packs.values())
    known = [job for job in jobs if job.job_id in state.jobs or not drawn]
    held = open_jobs | state.paused.keys() | (state.stands.keys() if drawn else set())
    return [job for job in known if job.job_id not in whole | held]


def _write_start(
    run: RunDirectory,
    journal: Journal,
    left: Sequence[Job],
    corners: Sequence[Job],
    plan: planner.Plan | None,
    settings: dict[str, Any],
) -> None:
    """Write down how this start runs, and what it adds: at first everything, later what was lost."""
    with journal.locked() as state:
        # decisions go on as they were made
        before = {name: state.settings.get(name, settings[name]) for name in ("scope", "reproducible")}
        journal.append("settings", settings=settings | before)
        if plan:
            write_atomic(run.path / "plan.json", plan.to_json())
            packs = first_packs(plan)
            if (
                corners and not state.packs
            ):  # the jobs are drawn as slots fall free; the plan holds their places
                packs = [pack | {"corners": [job.to_dict() for job in corners]} for pack in packs]
                left = []
            journal.add_plan({job.job_id: job.to_dict() for job in left}, packs)
    counts = {"jobs": len(journal.state.jobs), "finished": len(journal.state.ended)}
    run.event("started", **counts, versions=versions(), **settings)


def _work(job: Job, task: Task, scored: int) -> float:
    rows = task.train[job.job_id]
    return TRAINING_WORK * trained_rows(job, len(rows)) * float(rows.lengths.mean()) + scored


class _Watch:
    """Turn what workers say of themselves into progress, now and then into lines of events.jsonl, and feed trackers."""

    def __init__(
        self,
        run: RunDirectory,
        journal: Journal,
        progress: Progress,
        feed: Feed,
        work: Mapping[str, float],
        replanner: Replanner,
    ) -> None:
        self.run, self.journal, self.progress, self.feed, self.work = run, journal, progress, feed, work
        self.replanner = replanner
        self.sampled: dict[str, float] = {}
        self.fed, self.report_at = -math.inf, time.monotonic() + REPORT_S
        self.done, self.tokens, self.phase, self.since = 0.0, 0, "", time.time()
        self.workers: dict[str, dict[str, Any]] = {}

    def update(self, name: str, status: dict[str, Any]) -> None:
        """Take in one worker's state."""
        self.workers[name] = dict(status)
        if status["time"] - self.sampled.get(name, -math.inf) >= SAMPLE_S:
            self.sampled[name] = status["time"]
            self.run.event("sample", worker=name, **{k: v for k, v in status.items() if k not in UNSAMPLED})
        if time.monotonic() - self.fed >= FEED_S:
            self.feed.poll()
            self.fed = time.monotonic()
            self.replanner.look(self.workers.values())
        at_work = [
            str(w["pack"] if "-" in w["pack"] else w["phase"]) for w in self.workers.values() if w.get("pack")
        ]
        phase = ", ".join(dict.fromkeys(at_work))
        if phase and phase != self.phase:
            self.phase = phase
            self.progress.phase(phase)
        running = [item for w in self.workers.values() for item in (w.get("jobs") or {}).items()]
        ended = self.journal.refresh().ended
        usual = sum(self.work.values()) / max(len(self.work), 1)  # of a job that was drawn meanwhile
        done = sum(self.work.get(job_id, usual) for job_id in ended)
        done += sum(share * self.work.get(name, usual) for name, share in running if name not in ended)
        tokens = sum(int(w.get("tokens", 0)) for w in self.workers.values())
        loss = status.get("loss")
        note = f"loss {loss:.3f}" if loss is not None else ""
        if done > self.done or tokens > self.tokens:
            self.progress.advance(max(done - self.done, 0.0), max(tokens - self.tokens, 0), note)
            self._report()
        self.done, self.tokens = max(done, self.done), tokens

    def _report(self) -> None:
        """Write report.html when it is time, in at most a fiftieth of it."""
        began = time.monotonic()
        if began >= self.report_at:
            try:
                write_report(self.run.path)
            except Exception as error:  # for which no sweep ends
                self.run.event("error", cause=f"report.html: {error}")
            now = time.monotonic()
            self.report_at = now + max(REPORT_S, 50 * (now - began))


def _work_here(run: RunDirectory, base: Base | None, task: Task, console: Console, watch: _Watch) -> None:
    """Be the one worker; a signal that it answered with a checkpoint is then raised as it would have been."""
    worker = Worker(
        run.path, base=base, task=task, console=console, on_status=lambda status: watch.update("0", status)
    )
    try:
        worker.work()
    except Preempted as asked:
        run.event("interrupted", signal=asked.args[0])
        os.kill(os.getpid(), asked.args[0])
        signal.pause()
    finally:
        worker.close()


def _with_work(site: Site, journal: Journal) -> list[Group]:
    """Return the workers to start: of a mixture, those of types that packs are planned for."""
    state, devices = journal.refresh(), site.devices
    planned = {pack.get("device") for name, pack in state.packs.items() if name not in state.done}
    mine = [group for group in site.groups if devices.type_of(int(group.worker)).name in planned]
    return mine if isinstance(devices, planner.Mixture) and mine else site.groups


def _orphan(journal: Journal, alive: Sequence[str]) -> None:
    """Let any worker take the packs of those types of a mixture that have no worker, or none any more."""
    devices = journal.devices
    if isinstance(devices, planner.Devices):
        return
    served = {devices.type_of(int(worker)).name for worker in alive}
    for part in devices.parts:
        if part.spec.name not in served | journal.state.orphaned:
            journal.append("orphaned", device=part.spec.name)


def _drive(
    launcher: Launcher, groups: Sequence[Group], run: RunDirectory, console: Console, watch: _Watch
) -> None:
    """Keep workers at it until none is left or all is done, and tell of those that die."""
    jax.config.update("jax_platforms", "cpu")  # the devices are the workers'
    _orphan(watch.journal, [group.worker for group in groups])  # jobs added later are planned on all types
    launcher.start(run.path, groups)
    deadline = math.inf
    try:
        while launcher.alive() and time.monotonic() < deadline:
            time.sleep(0.3)
            # workers end when it is finished; one that waits for a node or for a restart does not
            if watch.journal.refresh().finished:
                deadline = min(deadline, time.monotonic() + END_S)
            for ended in launcher.poll():
                if ended.left and ended.cause:
                    _orphan(watch.journal, launcher.alive())
                if ended.cause:
                    run.event("worker_lost", worker=ended.worker, cause=ended.cause, left=ended.left)
                    then = "it is not started again" if ended.left else "it is started again"
                    say(console, f"worker {ended.worker}: {ended.cause}; {then}\n{ended.tail}".rstrip())
            for group in groups:
                status = run.read_json(f"workers/{group.worker}.json")
                if status and status.get("time", 0) >= watch.since:
                    watch.update(group.worker, status)
    finally:
        launcher.stop()


def _finish(run: RunDirectory, journal: Journal, sweep: Sweep, console: Console, out: Path) -> int:
    """Rank what there is, write the leaderboard and return the exit code."""
    state = journal.refresh()
    results = read_results(run, state.jobs)
    seen = {result.job.job_id for result in results}
    for job_id in state.withdrawn - seen:
        job = Job.from_dict(state.jobs[job_id])
        results.append(Result(job, "stopped", None, 0, 0, "withdrawn before it began"))
    metric, test = sweep.data.metric, run.read_json("test.json")
    base = run.read_json("base.json") or {"score": math.nan, "loss": math.nan, "rows": 0, "tokens": 0}
    rows = rank(results, metric)
    failed = sum(row["status"] == "failed" for row in rows)
    write_leaderboard(run, metric, Score(**base), rows, test)
    _link_best(run, rows[0], console)
    shutil.rmtree(run.path / FOLDER, ignore_errors=True)  # of jobs that were on their way
    (run.path / ROWS).unlink(missing_ok=True)
    run.event("finished", failed=failed)
    with contextlib.suppress(UserError):  # said by the leaderboard all the same
        say(console, f"report: {write_report(run.path)}")
    print_leaderboard(console, metric, Score(**base), rows, test, out)
    return int(failed > 0)


def sweep(
    base: Base, jobs: Sequence[Job], data: dict[str, Any], out: str | Path, **options: Any
) -> dict[str, Any]:
    """Run a sweep from Python and return its leaderboard, as leaderboard.json holds it.

    `data` holds the fields of the data section of SWEEP.yaml; options and errors are those of `run_sweep`.
    """
    out = Path(out)
    run_sweep(described(base.name, jobs, data), jobs, out, base=base, **options)
    return json.loads((out / "leaderboard.json").read_text(encoding="utf-8"))


def described(model: str, jobs: Sequence[Job], data: dict[str, Any]) -> Sweep:
    """Return the sweep whose file names these jobs, so that a run from Python can be checked and repeated."""
    plain, listed = Job().to_dict(), []
    for job in jobs:
        values = {name: value for name, value in job.to_dict().items() if value != plain[name]}
        unread = {one for one, readers in ONLY_WITH.items() if job.optimizer not in readers}
        unread |= {two for one, two in EXCLUDES if one in values}
        kept = {name: value for name, value in values.items() if name not in unread}
        listed.append({"learning_rate": job.learning_rate, **kept})
    return make_sweep(model=model, data=data, search={"jobs": listed})


def _begin(run: RunDirectory, sweep: Sweep, inputs: dict[str, str]) -> None:
    """Write what the run is made of, or check that it is the same run."""
    text, path = resolved(sweep), run.path / "sweep.yaml"
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else text
    if before != text and _anywhere(before) != _anywhere(text):
        raise UserError(
            f"{path}: this run was started with another configuration:\n{_difference(before, text)}"
        )
    then = run.read_json("inputs.json") or {}
    changed = [
        f"{name} changed since this run was started: then {digest}, now {inputs.get(name, 'absent')}"
        for name, digest in then.items()
        if inputs.get(name) != digest
    ]
    if changed:
        told = "\n".join(changed)
        raise UserError(f"{run.path}: {told}\nput back what was there, or give another directory")
    write_atomic(path, text)
    write_json(run.path / "inputs.json", inputs)


def _anywhere(text: str) -> dict[str, Any]:
    """Read a resolved sweep as it would be wherever its folder is: what lies in it is told by digests."""
    raw, _ = parse_yaml(text, "sweep.yaml")
    folder, model = raw.pop("base_dir", "."), Path(raw.get("model", ""))
    return raw | {"model": str(model.relative_to(folder) if model.is_relative_to(folder) else model)}


def _difference(before: str, after: str) -> str:
    import difflib

    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "then", "now", lineterm="", n=0)
    return "\n".join(lines)


def _link_best(run: RunDirectory, best: dict[str, Any], console: Console) -> None:
    target = run.path / "best"
    if target.exists() and not target.is_symlink():
        say(console, f"note: {target} is not the link of an earlier run, and is left as it is")
    elif best["adapter"]:
        link = run.path / ".best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(best["adapter"], target_is_directory=True)
        os.replace(link, target)
