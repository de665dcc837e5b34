"""Run a sweep: read the data, plan, train pack by pack, score, rank and export."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from planner import Pack, render_plan
from plora_jax.adapters import Adapter
from plora_jax.config import Sweep, make_sweep, resolved, unsupported
from plora_jax.data.examples import Examples
from plora_jax.data.shapes import MAX_SHAPES, Shape, choose_shapes
from plora_jax.errors import UserError
from plora_jax.evaluate import Score, Scorer, runtime_for
from plora_jax.jobs import Job
from plora_jax.leaderboard import Result, print_leaderboard, rank, write_leaderboard
from plora_jax.models.find import load_config, load_tokenizer
from plora_jax.models.load import Base, load_base
from plora_jax.peft import WEIGHTS, export_adapter, import_adapter
from plora_jax.planning import check_disk, disk_bytes, plan_jobs, trained_rows
from plora_jax.progress import Progress, make_console
from plora_jax.rundir import JsonLines, RunDirectory, check_unused, open_run, write_atomic, write_json
from plora_jax.space import EXCLUDES, ONLY_WITH
from plora_jax.step import pack_spec
from plora_jax.task import Task, read_task, start_adapters
from plora_jax.train import Trained, Work, train_pack

STEPS_PER_SHAPE = 64  # micro-steps that make one more compiled length worth its compilation
# Forward passes that a trained token costs: its own, and a backward pass to the inputs alone.
TRAINING_WORK = 2.0


def run_sweep(
    sweep: Sweep,
    jobs: Sequence[Job],
    out: Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    base: Base | None = None,
    console: Console | None = None,
) -> int:
    """Run a sweep into the directory `out` and return the exit code: 0 done, 1 some jobs failed.

    Whatever is wrong with the input is found before `out` is made. With `resume`, jobs that an earlier run finished
    are kept and the others start again. `dry_run` shows the plan and writes nothing. `base` spares loading the model.

    Raises:
      UserError: the model, a job, the data or the directory cannot be used.
    """
    if missing := unsupported(sweep):
        raise UserError("; ".join(missing))
    console = console or make_console()
    check_unused(out, resume)
    config = base.config if base else load_config(sweep.model)
    tokenizer = (base and base.tokenizer) or load_tokenizer(sweep.model)
    jobs, starts = start_adapters(sweep, config, jobs)
    task = read_task(sweep, jobs, tokenizer, config.vocab_size, console)
    scored = {job.job_id: task.eval.requests.tokens for job in jobs}
    plan = plan_jobs(sweep, config, jobs, task.train, scored)
    console.print(render_plan(plan), soft_wrap=True, highlight=False, markup=False)
    check_disk(out, disk_bytes(config, plan))
    if dry_run:
        return 0
    base = base or load_base(sweep.model, precision=sweep.precision.base)  # type: ignore[arg-type]
    with open_run(out, resume) as run:
        results = _begin(run, sweep, jobs, task.digests)
        write_atomic(run.path / "plan.json", plan.to_json())
        run.event("started", jobs=len(jobs), finished=len(results), device=jax.devices()[0].device_kind)
        work = sum(
            TRAINING_WORK
            * trained_rows(job, len(task.train[job.job_id]))
            * task.train[job.job_id].lengths.mean()
            + scored[job.job_id]
            for job in jobs
            if job.job_id not in results
        )
        with Progress(console, work) as progress:
            engine = Engine(
                sweep, base, task, run, progress, {job.job_id: job for job in jobs}, starts, results
            )
            for number, pack in enumerate(plan.packs, 1):
                engine.run_pack(pack, f"pack {number} of {len(plan.packs)}")
            base_score, test = engine.finish()
        rows = rank(list(results.values()), sweep.data.metric)
        write_leaderboard(run, sweep.data.metric, base_score, rows, test)
        _link_best(run, rows[0])
        run.event("finished", failed=sum(row["status"] == "failed" for row in rows))
        print_leaderboard(console, sweep.data.metric, base_score, rows, test, out)
        return int(any(row["status"] == "failed" for row in rows))


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
        unread = {one for one, kind in ONLY_WITH.items() if job.optimizer != kind}
        unread |= {two for one, two in EXCLUDES if one in values}
        kept = {name: value for name, value in values.items() if name not in unread}
        listed.append({"learning_rate": job.learning_rate, **kept})
    return make_sweep(model=model, data=data, search={"jobs": listed})


def _begin(run: RunDirectory, sweep: Sweep, jobs: Sequence[Job], data: dict[str, str]) -> dict[str, Result]:
    """Write what the run is made of, or check that it is the same run; return the results it already has."""
    text, path = resolved(sweep), run.path / "sweep.yaml"
    if path.exists() and (before := path.read_text(encoding="utf-8", errors="replace")) != text:
        raise UserError(
            f"{path}: this run was started with another configuration:\n{_difference(before, text)}"
        )
    read = run.read_json("data.json") or {}
    if changed := [name for name, digest in data.items() if read.get(name, digest) != digest]:
        raise UserError(
            f"{run.path}: {', '.join(changed)} changed since this run was started; "
            "put the rows back, or give another directory"
        )
    write_atomic(path, text)
    write_json(run.path / "data.json", data)
    found = {job.job_id: _result(run, job) for job in jobs}
    return {name: result for name, result in found.items() if result}


def _difference(before: str, after: str) -> str:
    import difflib

    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "then", "now", lineterm="", n=0)
    return "\n".join(lines)


def _result(run: RunDirectory, job: Job) -> Result | None:
    """Return how the job ended in an earlier run; None if it did not, or its record is damaged or its adapter gone."""
    record = run.read_json(f"jobs/{job.job_id}/job.json")
    try:
        score = Score(**record["score"]) if record["score"] else None
        names = ("steps", "tokens", "reason", "adapter")
        result = Result(job, record["status"], score, *(record[name] for name in names))
    except (KeyError, TypeError):
        return None
    kept = not result.adapter or (run.path / result.adapter / WEIGHTS).exists()
    return result if kept else None


def _link_best(run: RunDirectory, best: dict[str, Any]) -> None:
    if best["adapter"]:
        link = run.path / ".best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(best["adapter"], target_is_directory=True)
        os.replace(link, run.path / "best")


@dataclass
class Engine:
    """Train, score and export the packs of one run on this process's device."""

    sweep: Sweep
    base: Base
    task: Task
    run: RunDirectory
    progress: Progress
    jobs: dict[str, Job]
    starts: dict[str, Adapter]
    results: dict[str, Result]
    pending: list[Trained] = field(default_factory=list)  # exported, waiting to be scored together

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.base, runtime_for(self.base))

    def run_pack(self, pack: Pack, name: str) -> None:
        """Train the pack's jobs that are not finished yet, slot by slot as planned; export and score each."""
        queues: list[list[Work]] = [[] for _ in pack.slots]
        everything, work = [], []
        for place in sorted(pack.assign, key=lambda a: a.start_s):
            job = self.jobs[place.job_id]
            item = Work(job, self.task.train[job.job_id], self.starts.get(job.job_id))
            everything.append(item)
            if job.job_id not in self.results:
                queues[place.slot].append(item)
                work.append(item)
        if not work:
            return
        self.progress.phase(f"training, {name}")
        # made for all jobs of the pack, so that a resumed run goes on with the same program
        spec = pack_spec(self.base.config, [item.job for item in everything], slots=len(pack.slots))
        packing = self.sweep.data.packing and pack.m > 1
        shapes = self._shapes(everything, pack.m, packing)
        logs: dict[str, JsonLines] = {}
        for item in work:  # a job that starts again starts its log again
            path = self.run.job(item.job.job_id) / "metrics.jsonl"
            path.unlink(missing_ok=True)
            logs[item.job.job_id] = JsonLines(path)
        note = {"text": ""}

        def on_step(job: Job, line: dict[str, Any]) -> None:
            logs[job.job_id].append(line)
            note["text"] = f"loss {line['loss']:.3f}"

        def on_micro_step(tokens: int) -> None:
            self.progress.advance(TRAINING_WORK * tokens, tokens, note["text"])

        try:
            for trained in train_pack(
                self.base,
                spec,
                queues,
                pack.m,
                shapes,
                packing=packing,
                runtime=replace(runtime_for(self.base, pack.policy), segments=packing),
                on_step=on_step,
                on_micro_step=on_micro_step,
            ):
                self._ended(trained)
        finally:
            for log in logs.values():
                log.close()
        self._score_pending(name, len(pack.slots))

    def _shapes(self, work: Sequence[Work], m: int, packing: bool) -> Sequence[Shape]:
        pairs = [(item.examples, item.job.data_seed) for item in work]
        if self.sweep.data.buckets:
            return [fitting_shape(length, [e for e, _ in pairs]) for length in self.sweep.data.buckets]
        micro_steps = max(trained_rows(item.job, len(item.examples)) // m for item in work)
        limit = min(MAX_SHAPES, 1 + micro_steps // STEPS_PER_SHAPE)
        return choose_shapes(pairs, 1 if packing else m, group=m, fill=packing, limit=limit)

    def _ended(self, trained: Trained) -> None:
        job = trained.job
        if trained.reason:
            self._record(Result(job, "failed", None, trained.steps, trained.tokens, trained.reason))
            return
        name = self.sweep.export.base_model or self.sweep.model
        export_adapter(self.run.job(job.job_id) / "adapter", name, self.base.config, job, trained.adapter)
        self.run.event("trained", job_id=job.job_id, steps=trained.steps, tokens=trained.tokens)
        self.pending.append(trained)

    def _score_pending(self, name: str, together: int) -> None:
        """Score what has been trained, as many adapters at once as the pack had slots: their memory is free now."""
        while self.pending:
            self.progress.phase(f"scoring, {name}")
            group, self.pending = self.pending[:together], self.pending[together:]
            adapters = [(trained.job, trained.adapter) for trained in group]
            scores = self.scorer.score(adapters, self.task.eval, self.progress.advance)
            for trained, result in zip(group, scores, strict=True):
                job, counts = trained.job, (trained.steps, trained.tokens)
                if math.isfinite(result.loss):
                    ended = Result(job, "completed", result, *counts, "", f"jobs/{job.job_id}/adapter")
                else:
                    ended = Result(job, "failed", None, *counts, "the loss on held-out rows is not finite")
                self._record(ended)

    def _record(self, result: Result) -> None:
        job = result.job
        record = {
            "job_id": job.job_id,
            "status": result.status,
            "score": vars(result.score) if result.score else None,
            "steps": result.steps,
            "tokens": result.tokens,
            "reason": result.reason,
            "adapter": result.adapter,
            "job": job.to_dict(),
        }
        write_json(self.run.job(job.job_id) / "job.json", record)
        self.run.event(result.status, job_id=job.job_id, reason=result.reason)
        self.results[job.job_id] = result

    def finish(self) -> tuple[Score, dict[str, Any] | None]:
        """Score the base model on eval, and base and winner on test, which nothing was chosen by."""
        self.progress.phase("scoring the base model")
        base = self.scorer.score([None], self.task.eval)[0]
        rows = rank(list(self.results.values()), self.sweep.data.metric)
        if self.task.test is None or rows[0]["status"] == "failed":
            return base, None
        best = self.jobs[rows[0]["job_id"]]
        self.progress.phase("scoring base and best on the test rows")
        adapter, _ = import_adapter(self.run.path / rows[0]["adapter"], self.base.config)
        on_base, on_best = self.scorer.score([None, (best, adapter)], self.task.test)
        return base, {
            "rows": on_base.rows,
            "base": vars(on_base),
            "best": {"job_id": best.job_id, **vars(on_best)},
        }


def fitting_shape(length: int, data: Sequence[Examples]) -> Shape:
    """Return the shape of `length` positions that holds the labels of every row that short."""
    most = max(
        (int(examples.counts[examples.lengths <= length].max(initial=1)) for examples in data), default=1
    )
    return Shape(length, min(length, most))
