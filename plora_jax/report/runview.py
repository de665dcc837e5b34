"""What a run directory says at this moment, whether the run goes on, has ended, or was cut off: a fold of its files."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plora_jax.engine.rundir import is_run
from plora_jax.errors import UserError
from plora_jax.evaluation.leaderboard import rank_rows
from plora_jax.evaluation.metrics import BUILT_IN, wilson
from plora_jax.jobs import JOB_FIELDS
from plora_jax.report.runfiles import RunFiles, entries, job_of, kind, mapping, mappings, number
from plora_jax.report.spans import ENDS, Bar, Span, fold

FRESH_S = 60.0  # a run of another machine, whose lock cannot be seen, goes on if it wrote within this time
PAUSE_S = 30.0  # a longer silence before a restart is cut out of the time axis
SHARES = ("choice_accuracy", "exact_match")  # metrics that are the share of right rows
STEP = ("step", "loss", "tokens", "lr", "grad_norm")
EVAL = ("step", "fraction", "score", "loss")


@dataclass
class JobView:
    """Hold one job: its configuration, how it stands, and its score (the latest one, while it runs)."""

    job_id: str
    fields: dict[str, Any]
    status: str = "waiting"  # waiting | running | unfinished | completed | stopped | failed | withdrawn
    score: float | None = None
    loss: float | None = None
    low: float | None = None  # 95 % interval of the score
    high: float | None = None
    steps: int = 0
    tokens: int = 0
    fraction: float | None = None  # of its own training
    reason: str = ""
    adapter: str = ""
    seeds: int = 1
    mean_score: float | None = None


@dataclass
class RunView:
    """Hold a run: its jobs best first, its workers, its log, and its clock without the pauses."""

    name: str
    state: str  # running | finished | stopped
    metric: str
    higher_is_better: bool
    base: dict[str, Any]
    test: dict[str, Any]
    jobs: list[JobView]
    plan: dict[str, Any]
    sweep: dict[str, Any]
    started: dict[str, Any]  # the last `started` event
    log: list[dict[str, Any]]  # events and journal in order of time
    samples: dict[str, dict[str, np.ndarray]]  # by worker: time (run clock) and what was measured
    workers: dict[str, dict[str, Any]]
    packs: dict[str, list[str]] = field(default_factory=dict)  # by pack: its jobs, planned or placed
    spans: list[Span] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)  # seconds since the epoch
    first: float = 0.0
    last: float = 0.0

    def clock(self, when: float) -> float:
        """Return seconds of the run at a time since the epoch: since its start, its pauses left out."""
        paused = sum(min(max(when - a, 0.0), b - a) for a, b in self.pauses)
        return max(when - self.first - paused, 0.0)

    def of_status(self, *status: str) -> list[JobView]:
        """Return the jobs that stand so."""
        return [job for job in self.jobs if job.status in status]

    def varied(self) -> list[str]:
        """Return the fields in which the jobs differ, in the order of their definition."""
        names = [*JOB_FIELDS, *sorted({name for job in self.jobs for name in job.fields} - set(JOB_FIELDS))]
        return [name for name in names if len({repr(job.fields.get(name)) for job in self.jobs}) > 1]


def read_view(files: RunFiles, now: float | None = None) -> RunView:
    """Return how a run stands at `now` (seconds since the epoch; by default this moment).

    Raises:
      UserError: the directory is not that of a run.
    """
    if not is_run(files.path):
        what = "is not a run directory: neither journal.jsonl nor events.jsonl is there"
        raise UserError(f"{files.path}: {what if files.path.exists() else 'there is no such directory'}")
    now = time.time() if now is None else now
    journal, events = files.lines("journal.jsonl"), files.lines("events.jsonl")
    board, plan, sweep = files.mapping("leaderboard.json"), files.mapping("plan.json"), _sweep(files)
    log = sorted(
        (line for line in [*journal, *events] if kind(line) != "sample"),
        key=lambda line: number(line.get("time")) or 0.0,
    )
    data = sweep.get("data") if isinstance(sweep.get("data"), dict) else {}
    base = files.mapping("base.json") or mapping(board.get("base"))
    metric = str(board.get("metric") or base.get("metric") or (data or {}).get("metric") or "loss")
    higher = board.get("higher_is_better", base.get("higher_is_better", BUILT_IN.get(metric, True)))
    workers = {name[:-5]: files.mapping(f"workers/{name}") for name in files.names("workers", ".json")}
    starts = [line for line in events if kind(line) == "started"]
    view = RunView(
        name=files.path.resolve().name,
        state=_state(files, events, now),
        metric=metric,
        higher_is_better=bool(higher),
        base=base,
        test=mapping(board.get("test")) or files.mapping("test.json"),
        jobs=[],
        plan=plan,
        sweep=sweep,
        started=starts[-1] if starts else {},
        log=log,
        samples={},
        workers=workers,
    )
    _set_clock(view, [*journal, *events], starts, now)
    _set_samples(view, events)
    view.spans, view.bars = fold(log, view.clock, view.clock(view.last))
    view.jobs = _jobs(files, view, board, journal, plan)
    for line in journal:
        for name, pack in mapping(line.get("packs")).items():
            view.packs[name] = [str(job) for job in entries(mapping(pack).get("jobs"))]
    return view


def _sweep(files: RunFiles) -> dict[str, Any]:
    from plora_jax.config.yamlfile import parse_yaml

    try:
        return mapping(parse_yaml(files.text("sweep.yaml"), "sweep.yaml")[0])
    except UserError:
        return {}


def _state(files: RunFiles, events: list[dict[str, Any]], now: float) -> str:
    ends = [kind(line) for line in events if kind(line) in ("started", "finished", "interrupted")]
    if (ends and ends[-1] == "finished") or (not ends and files.value("leaderboard.json") is not None):
        return "finished"
    fresh = now - files.written() < FRESH_S and ends[-1:] != ["interrupted"]
    return "running" if files.locked() or fresh else "stopped"


def _set_clock(view: RunView, lines: list[dict[str, Any]], starts: list[dict[str, Any]], now: float) -> None:
    times = np.sort([when for line in lines if (when := number(line.get("time"))) is not None])
    if not len(times):
        return
    beats = [number(worker.get("time")) or 0.0 for worker in view.workers.values()]
    view.first = float(times[0])
    view.last = now if view.state == "running" else max(float(times[-1]), *beats, 0.0)
    for line in starts[1:]:
        if (start := number(line.get("time"))) is not None:
            before = float(times[max(int(np.searchsorted(times, start)) - 1, 0)])
            if start - before > PAUSE_S:
                view.pauses.append((before, start))


MEASURES = ("tokens_per_s", "tokens", "device_bytes", "device_limit_bytes", "host_rss_bytes")


def _set_samples(view: RunView, events: list[dict[str, Any]]) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in events:
        if kind(line) == "sample" and number(line.get("time")) is not None:
            rows.setdefault(str(line.get("worker", "0")), []).append(line)
    for worker, lines in sorted(rows.items()):
        columns: dict[str, list[float]] = {name: [] for name in ("time", *MEASURES)}
        for line in sorted(lines, key=lambda line: line["time"]):
            columns["time"].append(view.clock(line["time"]))
            for name in MEASURES:
                value = number(line.get(name))
                columns[name].append(np.nan if value is None else value)
        view.samples[worker] = {name: np.array(column) for name, column in columns.items()}


def _jobs(
    files: RunFiles,
    view: RunView,
    board: dict[str, Any],
    journal: list[dict[str, Any]],
    plan: dict[str, Any],
) -> list[JobView]:
    """Return all jobs of the run, best first; those without a score come after those with one."""
    found: dict[str, JobView] = {}

    def take(name: Any, fields: Any) -> JobView:
        known = {key: value for key, value in mapping(fields).items() if key in JOB_FIELDS}
        job = found.setdefault(str(name), JobView(str(name), {}))
        job.fields |= known
        return job

    for name, fields in mapping(plan.get("jobs")).items():
        take(name, fields)
    for line in journal:
        if kind(line) == "jobs":
            for key, fields in mapping(line.get("jobs")).items():
                take(key, fields)
            for fields in mappings(line.get("jobs")):
                take(fields.get("job_id", ""), fields)
    folders = set(files.names("jobs"))
    records = {name: files.mapping(f"jobs/{name}/job.json") for name in sorted(folders)}
    for name, record in records.items():
        if record.get("status"):
            score = mapping(record.get("score"))
            _settle(
                take(name, record.get("job")),
                record | {key: score.get(key) for key in ("score", "loss", "low", "high")},
            )
    for row in mappings(board.get("jobs")):
        _settle(take(row.get("job_id"), row), row)
    for line in journal:
        job = found.get(job_of(line))
        if job and kind(line) in ("ended", "withdraw") and job.status not in ENDS:
            job.status = str(line.get("status") or "withdrawn")
            job.reason = str(line.get("reason") or job.reason)
    _follow(files, view, [job for job in found.values() if job.job_id in folders], journal)
    rows_scored = int(number(view.base.get("rows")) or 0)
    for job in found.values():
        if job.low is None and job.score is not None and view.metric in SHARES and rows_scored >= 1:
            job.low, job.high = wilson(min(max(job.score, 0.0), 1.0), rows_scored)
    return _ordered(found.values(), view.higher_is_better)


def _settle(job: JobView, row: dict[str, Any]) -> None:
    """Take over how a job ended from its record or its row of the leaderboard."""
    job.status, job.reason = str(row.get("status", "")), str(row.get("reason") or "")
    job.score, job.loss = number(row.get("score")), number(row.get("loss"))
    job.steps, job.tokens = int(number(row.get("steps")) or 0), int(number(row.get("tokens")) or 0)
    job.fraction = number(row.get("fraction"))
    job.adapter = str(row.get("adapter") or "")
    job.low, job.high = number(row.get("low")), number(row.get("high"))


def _follow(files: RunFiles, view: RunView, jobs: list[JobView], journal: list[dict[str, Any]]) -> None:
    """Add what the logs of jobs tell: how far they came, and how those that have not ended stand."""
    scores = {job_of(line): line for line in journal if kind(line) == "score"}
    at_work = [mapping(worker.get("jobs")) for worker in view.workers.values()]
    for job in jobs:
        evals = files.columns(f"jobs/{job.job_id}/evals.jsonl", EVAL)
        point = scores.get(job.job_id, {})
        step, fraction = number(point.get("step")), number(point.get("fraction"))
        share = max(
            (s for s in (number(jobs.get(job.job_id)) for jobs in at_work) if s is not None), default=None
        )
        if len(evals["step"]):
            step, fraction = float(evals["step"][-1]), float(evals["fraction"][-1])
        if job.status in ENDS:
            if job.status == "completed":
                job.fraction = 1.0
            elif job.fraction is None and step and fraction and fraction > 0:
                job.fraction = min(job.steps * fraction / step, 1.0)
            continue
        steps = curve(files, job.job_id)
        if not len(steps["step"]) and step is None:
            continue
        job.status = "running" if view.state == "running" else "unfinished"
        job.steps = int(steps["step"][-1]) if len(steps["step"]) else int(step or 0)
        job.tokens = int(np.nansum(steps["tokens"]))
        job.score = number(float(evals["score"][-1])) if len(evals["step"]) else number(point.get("value"))
        job.loss = number(float(evals["loss"][-1])) if len(evals["step"]) else number(point.get("loss"))
        if step and fraction and fraction > 0:
            job.fraction = min(job.steps * fraction / step, 1.0)
        elif share is not None:
            job.fraction = min(max(share, 0.0), 1.0)


def _ordered(jobs: Iterable[JobView], higher_is_better: bool) -> list[JobView]:
    """Order as the leaderboard does; jobs that have not ended and have no score yet come last."""
    jobs = list(jobs)
    by_id = {job.job_id: job for job in jobs}
    known = [job for job in jobs if job.status in ("completed", "stopped", "failed") or job.score is not None]
    rows = [
        {"job_id": job.job_id, "status": job.status, "score": job.score, "loss": job.loss, **job.fields}
        for job in known
    ]
    out = []
    for row in rank_rows(rows, higher_is_better):
        job = by_id.pop(row["job_id"])
        job.seeds, job.mean_score = row["seeds"], row["mean_score"]
        out.append(job)
    return out + sorted(by_id.values(), key=lambda job: (job.status == "waiting", job.job_id))


def curve(files: RunFiles, job_id: str) -> dict[str, np.ndarray]:
    """Return a job's columns of metrics.jsonl, one entry a step: of a step that was done again, the last one."""
    columns = files.columns(f"jobs/{job_id}/metrics.jsonl", STEP)
    steps = columns["step"]
    if len(steps) and not (np.diff(steps) > 0).all():
        _, last = np.unique(steps[::-1], return_index=True)
        kept = len(steps) - 1 - last
        columns = {name: column[kept] for name, column in columns.items()}
    return columns


def open_view(path: Path) -> tuple[RunFiles, RunView]:
    """Open a run directory and read it once."""
    files = RunFiles(path)
    return files, read_view(files)
