"""A run directory as a sweep with ASHA, refilled slots, a lost worker and a restart leaves it, made without training.

The scores and losses are those of a formula; every file has the form that the engine writes.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from planner.plan import Assign, Pack, Plan
from plora_jax.evaluation.leaderboard import rank_rows
from plora_jax.evaluation.metrics import wilson
from plora_jax.jobs import Job

START = 1_796_000_000.0
ROWS = 400  # held-out
TRAIN_ROWS = 4096
TOKENS_A_ROW = 24
RUNGS = (0.125, 0.25, 0.5)


def make_jobs(count: int, seed: int = 0) -> list[Job]:
    """Draw configurations as `search.sample` would."""
    draw = np.random.default_rng(seed)
    jobs = {}
    while len(jobs) < count:
        rank = int(draw.choice([8, 16, 32, 64, 128]))
        rate = float(f"{math.exp(draw.uniform(math.log(2e-5), math.log(2e-3))):.3g}")
        job = Job(
            learning_rate=rate,
            rank=rank,
            alpha=float(rank * draw.choice([0.5, 1, 2])),
            batch_size=int(draw.choice([4, 8, 16, 32])),
            scheduler=str(draw.choice(["cosine", "linear"])),  # type: ignore[arg-type]
            epochs=1.0,
            warmup_ratio=0.03,
        )
        jobs[job.job_id] = job
    return list(jobs.values())


def quality(job: Job) -> float:
    """Return the share of right rows that a job would reach in the end; below 0 it diverges."""
    if job.learning_rate * job.alpha / job.rank > 2.4e-3:
        return -1.0
    off = math.log10(job.learning_rate * math.sqrt(8 / job.batch_size) / 3e-4)
    return 0.86 - 0.22 * off * off + 0.012 * math.log2(job.rank / 8)


def make_plan(jobs: list[Job], workers: int, slots: int, seconds: float) -> Plan:
    """Lay the jobs out in packs of `slots`, slot by slot, a device for each worker."""
    packs, ends = [], [0.0] * workers
    size = max(slots * 4, 1)
    for start in range(0, len(jobs), size):
        device, group = int(np.argmin(ends)), jobs[start : start + size]
        at = ends[device]
        free = [at + 40.0] * min(slots, len(group))
        assign = []
        for job in group:
            slot = int(np.argmin(free))
            assign.append(Assign(job.job_id, slot, free[slot], free[slot] + seconds, 4.0))
            free[slot] += seconds
        ends[device] = max(free)
        packs.append(
            Pack(
                jobs=tuple(job.job_id for job in group),
                degree=1,
                m=4,
                policy="none",
                slots=(128,) * len(free),
                length_buckets=(128, 256),
                row_tokens=180.0,
                step_s=0.21,
                steps=4000,
                assign=tuple(assign),
                devices=(device,),
                start_s=at,
                end_s=ends[device],
                setup_s=40.0,
                memory_bytes=61 * 2**30,
                memory_limit_bytes=72 * 2**30,
            )
        )
    makespan = max(ends)
    return Plan(
        makespan_s=makespan, lower_bound_s=0.97 * makespan, bound="lp", packs=tuple(packs),
        jobs={job.job_id: {"rows": TRAIN_ROWS, "row_tokens": 180.0} | job.to_dict() for job in jobs},
        device="H100-80GB", device_count=workers, model="Qwen/Qwen2.5-7B", precision="bf16", method="slots",
        baselines={"min_gpu_s": 6.1 * makespan, "greedy_s": 1.13 * makespan},
    )  # fmt: skip


class Writer:
    """Collect lines of files and write them in order of time."""

    def __init__(self, run: Path) -> None:
        self.run, self.journal, self.events = run, [], []  # type: ignore[var-annotated]

    def note(self, when: float, what: str, **fields: Any) -> None:
        """Add a decision to the journal."""
        self.journal.append({"time": round(START + when, 3), "kind": what, **fields})

    def event(self, when: float, what: str, **fields: Any) -> None:
        """Add an event."""
        self.events.append({"time": round(START + when, 3), "event": what, **fields})

    def write(self) -> None:
        """Write both logs."""
        for name, lines in (("journal", self.journal), ("events", self.events)):
            write_lines(self.run / f"{name}.jsonl", sorted(lines, key=lambda line: line["time"]))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as the engine does, without waiting for the disk."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write JSON lines as the engine does: no NaN."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines))


def make_run(
    run: Path,
    jobs: list[Job] | None = None,
    *,
    count: int = 40,
    steps: int = 0,
    workers: int = 2,
    slots: int = 5,
    seconds: float = 900.0,
    asha: bool = True,
    until: float | None = None,
    seed: int = 0,
) -> Path:
    """Write a run: of `jobs`, else of `count` drawn ones; `steps` fixes each job's optimizer steps (else its batch
    size does); `until` stops the clock after so many seconds, as a running or killed sweep would look.
    """
    jobs = make_jobs(count, seed) if jobs is None else jobs
    run.mkdir(parents=True)
    (run / "workers").mkdir()
    plan, draw, out = make_plan(jobs, workers, slots, seconds), np.random.default_rng(seed), Writer(run)
    (run / "plan.json").write_text(plan.to_json())
    (run / "sweep.yaml").write_text(
        "model: Qwen/Qwen2.5-7B\ndata: {train: train.jsonl, eval: dev.jsonl, test: test.jsonl, "
        "metric: choice_accuracy, max_length: 256}\nsearch: {sample: 40, seed: 0}\n"
        f"early_stop: {{method: {'asha' if asha else 'none'}}}\ntrain: {{epochs: 1}}\n"
    )
    settings = {"scope": "sweep", "devices": {"spec": {"name": "H100-80GB"}, "count": workers}}
    versions = {"plora_jax": "0.1.0", "jax": "0.11.2", "flax": "0.12.10"}
    out.note(0, "settings", settings=settings)
    out.event(0, "started", jobs=len(jobs), finished=0, versions=versions, **settings)
    out.note(0, "jobs", jobs={job.job_id: job.to_dict() for job in jobs})
    out.note(0, "packs", packs={f"pack-{n:03d}": {"jobs": pack.jobs} for n, pack in enumerate(plan.packs, 1)})
    ends = dict.fromkeys(range(workers), 6.0)
    rows: list[dict[str, Any]] = []
    rungs: dict[float, list[float]] = {rung: [] for rung in RUNGS}
    by_id = {job.job_id: job for job in jobs}
    for number, pack in enumerate(plan.packs, 1):
        held = f"pack-{number:03d}"
        worker = min(ends, key=lambda w: ends[w])
        begun = ends[worker]
        out.note(begun, "claim", pack=held, worker=str(worker))
        lost = begun + 0.4 * seconds if number == 2 else None
        free = [begun + 44.0] * len(pack.slots)
        for name in pack.jobs:
            slot = int(np.argmin(free))
            row, took = train(
                run, by_id[name], steps, seconds, rungs if asha else {}, draw, START + free[slot]
            )
            place = free[slot]
            free[slot] += took
            if until is not None and place > until:
                shutil.rmtree(run / "jobs" / name)
                continue
            out.note(place, "place", pack=held, at=int(place), slot=slot, job_id=name)
            if until is None or free[slot] <= until:
                out.note(free[slot], "ended", job_id=name, status=row["status"])
                out.event(free[slot], row["status"], job_id=name, reason=row["reason"])
                rows.append(row)
                write_record(run, by_id[name], row)
            else:
                cut(run / "jobs" / name, (until - place) / took)
        if lost:
            cause = "killed by signal 9 (out of host memory?)"
            out.event(lost, "worker_lost", worker=str(worker), cause=cause, left=False)
            out.note(lost + 45, "lost", pack=held, cause="its worker was killed")
            out.note(lost + 45, "claim", pack=held, worker=str(worker))
        ends[worker] = max(free)
        if until is None or ends[worker] <= until:
            out.note(ends[worker], "done", pack=held)
    last = max(ends.values()) if until is None else until
    sample(out, workers, last, draw)
    low, high = wilson(0.5325, ROWS)
    base = {"score": 0.5325, "loss": 2.137, "rows": ROWS, "low": low, "high": high}
    write_json(run / "base.json", base)
    for w in range(workers):
        write_json(run / "workers" / f"{w}.json", heartbeat(last))
    if until is None:
        finish(run, rank_rows(rows, True), base)
        out.event(last + 5, "finished", failed=sum(row["status"] == "failed" for row in rows))
    else:
        out.journal = [line for line in out.journal if line["time"] <= START + until]
    out.write()
    return run


def train(
    run: Path,
    job: Job,
    steps: int,
    seconds: float,
    rungs: dict[float, list[float]],
    draw: np.random.Generator,
    begun: float,
) -> tuple[dict[str, Any], float]:
    """Write a job's logs; return its row of the leaderboard and the seconds that it took."""
    folder = run / "jobs" / job.job_id
    folder.mkdir(parents=True)
    steps = steps or TRAIN_ROWS // job.batch_size
    final, status, reason, done = quality(job), "completed", "", steps
    evals: list[dict[str, Any]] = []
    level = final + 0.008 * float(draw.standard_normal())

    def accuracy(fraction: float) -> float:
        share = 0.53 + (level - 0.53) * (1 - math.exp(-5 * fraction)) / (1 - math.exp(-5))
        return round(share * ROWS) / ROWS

    if final < 0:
        status, reason, done = "failed", "10 gradients in a row were not finite", max(steps // 20, 11)
    else:
        for fraction in (*RUNGS, 1.0):
            step, score = math.ceil(fraction * steps), accuracy(fraction)
            loss = 2.4 - 2.1 * score
            point = {"step": step, "fraction": step / steps, "score": score, "loss": loss}
            evals.append(
                point | {"train_loss": loss * 0.94, "rows": ROWS, "time": begun + fraction * seconds}
            )
            if fraction in rungs:
                rungs[fraction].append(score)
                better = sorted(rungs[fraction], reverse=True)[: max(len(rungs[fraction]) // 3, 1)]
                if len(rungs[fraction]) >= 3 and score < better[-1]:
                    status, done = "stopped", step
                    reason = f"not in the top third at {fraction:.1%} of its training"
                    break
    at = np.arange(1, done + 1)
    falls = 0.7 + 1.6 * np.exp(-4.0 * at / steps) + (0.86 - max(final, 0.3)) * 1.5
    losses = falls * np.exp(0.25 / math.sqrt(job.batch_size / 4) * draw.standard_normal(done))
    if final < 0:
        losses = losses * np.exp(np.minimum(at / 4, 60.0))
    lines = [
        {
            "step": int(step), "loss": float(loss) if final >= 0 or step <= done - 10 else None,
            "lr": job.learning_rate * (1 - step / (steps + 1)), "grad_norm": 0.8 + float(loss) / 9,
            "tokens": job.batch_size * TOKENS_A_ROW, "skipped": 0,
        }
        for step, loss in zip(at, losses, strict=True)
    ]  # fmt: skip
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "evals.jsonl", evals)
    low, high = wilson(evals[-1]["score"], ROWS) if evals else (None, None)
    row = {
        "job_id": job.job_id, "status": status, "score": evals[-1]["score"] if evals else None,
        "low": low, "high": high,        "loss": evals[-1]["loss"] if evals else None, "steps": done,
        "tokens": done * job.batch_size * TOKENS_A_ROW, "reason": reason,
        "adapter": f"jobs/{job.job_id}/adapter" if evals else "", **job.to_dict(),
    }  # fmt: skip
    return row, max(done / steps * seconds, 5.0)


def write_record(run: Path, job: Job, row: dict[str, Any]) -> None:
    """Write how a job ended, and what of its adapter the report reads."""
    score = None
    if row["score"] is not None:
        score = {"score": row["score"], "loss": row["loss"], "rows": ROWS, "tokens": 2 * ROWS}
        score |= {"low": row["low"], "high": row["high"]}
    names = ("job_id", "status", "steps", "tokens", "reason", "adapter")
    record = {name: row[name] for name in names} | {"score": score, "job": job.to_dict()}
    write_json(run / "jobs" / job.job_id / "job.json", record)
    if row["adapter"]:
        (run / row["adapter"]).mkdir(exist_ok=True)
        config = {"base_model_name_or_path": "Qwen/Qwen2.5-7B", "r": job.rank, "lora_alpha": job.alpha}
        write_json(run / row["adapter"] / "adapter_config.json", config | {"rank_pattern": {}})


def cut(folder: Path, share: float) -> None:
    """Leave of a job's logs what was written before the clock stopped, with a torn last line."""
    for name in ("metrics.jsonl", "evals.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        kept = lines[: int(share * len(lines))]
        (folder / name).write_text("".join(kept) + '{"step": 12, "lo')


def sample(out: Writer, workers: int, last: float, draw: np.random.Generator) -> None:
    """Write resource samples of every worker, one every ten seconds."""
    for w in range(workers):
        tokens = 0.0
        for when in np.arange(10.0, last, 10.0):
            rate = 0.0 if when < 50 else 19_400 + 700 * float(draw.standard_normal()) - 900 * w
            tokens += 10 * rate
            out.event(
                float(when), "sample", worker=str(w), tokens=int(tokens), tokens_per_s=round(rate, 1),
                device_bytes=int((18 if when < 50 else 61 + 2 * w) * 2**30),
                device_limit_bytes=72 * 2**30, host_rss_bytes=int(9.5 * 2**30), step_ms=212.0,
            )  # fmt: skip


def heartbeat(when: float) -> dict[str, Any]:
    """Return what a worker says of itself about once a second."""
    return {
        "time": START + when, "pid": 4242, "host": "node-1", "pack": "pack-001", "phase": "training, pack-001",
        "jobs": {}, "tokens": 1_234_567, "tokens_per_s": 19_400.0, "micro_step": 2048,
        "step_ms": 212.0, "host_rss_bytes": 9 * 2**30, "device_bytes": 61 * 2**30,
        "device_limit_bytes": 72 * 2**30,
    }  # fmt: skip


def finish(run: Path, rows: list[dict[str, Any]], base: dict[str, Any]) -> None:
    """Write the leaderboard, as at the end of a sweep, with the scores on the test rows."""
    best = rows[0] if rows and rows[0]["score"] is not None else None
    test = {"rows": 1000, "base": {"score": 0.529, "loss": 2.141, "rows": 1000, "tokens": 2000}}
    if best:
        test["best"] = {"job_id": best["job_id"], "score": 0.853, "loss": 0.63, "rows": 1000, "tokens": 2000}
    write_json(
        run / "leaderboard.json",
        {
            "metric": "choice_accuracy", "higher_is_better": True, "base": base,
            "test": test if best else None, "jobs": rows,
        },
    )  # fmt: skip
