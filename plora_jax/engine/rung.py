"""Jobs between two packs: what they leave at a rung, how they go on from there, and how those end that do not.

Where a plan goes rung by rung, a job that passes a rung leaves its pack there. Its state is a checkpoint of its own,
`waiting/JOB/STEP`, which names no pack; the journal says that it is there. When no pack is open any more, one worker
judges all jobs that wait once more, with all that have come to the rung, and plans the others to their next rungs.
"""

import shutil
from typing import TYPE_CHECKING, Any

from plora_jax.data.layout import total_steps
from plora_jax.engine.checkpoint import Checkpoints
from plora_jax.engine.faults import fault
from plora_jax.engine.replan import plan_left
from plora_jax.errors import UserError
from plora_jax.evaluation.scorer import Score
from plora_jax.jobs import Job
from plora_jax.peft import export_adapter, replace_directory
from plora_jax.training.trainer import Trained, Waiting, waiting_like

if TYPE_CHECKING:
    from plora_jax.engine.worker import Worker

FOLDER = "waiting"


def write_waiting(worker: "Worker", job_id: str, waiting: Waiting) -> None:
    """Put a job's state on the disk, whole or not at all."""
    step = waiting.meta["cursor"][2]
    checkpoints = Checkpoints(worker.run.path / FOLDER / job_id / str(step), keep=1)
    try:
        checkpoints.save(step, waiting.arrays, waiting.meta)
    finally:
        checkpoints.close()


def read_waiting(worker: "Worker", job: Job, step: int) -> Waiting | None:
    """Read the state that a job left at a step; None, and an event, where its files were damaged."""
    checkpoints = Checkpoints(worker.run.path / FOLDER / job.job_id / str(step), keep=1)
    try:
        found = checkpoints.restore(waiting_like(worker.base, job))
    finally:
        checkpoints.close()
    if found is None:
        worker.run.event("error", cause=f"{checkpoints.directory}: job {job.job_id} cannot go on from there")
        return None
    return Waiting(*found[1:])


def export(worker: "Worker", trained: Trained, folder: str) -> None:
    """Export what a job has come to into a folder of its directory."""
    name = worker.sweep.export.base_model or worker.sweep.model
    directory = worker.run.job(trained.job.job_id) / folder
    export_adapter(directory, name, worker.base.config, trained.job, trained.adapter, worker.base.precision)


def conclude(
    worker: "Worker", trained: Trained, total: int, best_step: int, status: str, reason: str
) -> None:
    """Export and record what a job has come to, of `total` steps, its best evaluation being at `best_step`.

    One that was stopped before its first evaluation has no adapter.
    """
    job_id, scores = trained.job.job_id, worker.journal.state.scores
    unscored = status == "stopped" and (job_id, trained.steps) not in scores and not best_step
    if unscored:
        reason = f"{reason} before it was scored"
    score: Score | None = None
    more: dict[str, Any] = {"fraction": trained.steps / total}
    if status != "failed" and not unscored:
        step = best_step if worker.sweep.train.keep == "best" else trained.steps
        fault("export")
        directory = worker.run.job(job_id)
        if step < trained.steps:
            if (directory / "best").exists():  # not moved before a kill
                replace_directory(directory / "best", directory / "adapter")
        else:
            export(worker, trained, "adapter")
            shutil.rmtree(directory / "best", ignore_errors=True)  # of an earlier step
        score = Score(**scores[job_id, step]["score"])
        more |= {"best_step": best_step, "kept_step": step}
    worker.record(trained, status, score, reason, **more)


def plan_rung(worker: "Worker") -> None:
    """Judge the jobs that wait at a rung with all that have come there, and plan those that go on.

    Raises:
      UserError: no plan is possible.
    """
    journal, rule = worker.journal, worker.rule
    worker.status(phase="planning what goes on from a rung", pack=None)
    with journal.locked() as state:
        names = state.at_rung
        lines = []
        for job_id in names:
            verdict = rule.decide(job_id, state.points)
            if verdict.stop:
                at = {"job_id": job_id, "step": state.paused[job_id]["step"]}
                lines.append(("verdict", at | {"stop": True, "reason": verdict.reason}))
        journal.extend(lines)
        known = {
            job_id: state.verdicts.get((job_id, state.paused[job_id]["step"]), {"stop": False})
            for job_id in names
        }
        reasons = {job_id: line["reason"] for job_id, line in known.items() if line["stop"]}
        reasons |= {job_id: "withdrawn" for job_id in names if job_id in state.withdrawn}
    for job_id, reason in reasons.items():
        item = worker.item(job_id)
        step = journal.state.paused[job_id]["step"]
        waiting = read_waiting(worker, item.job, step)
        if waiting is None:
            lost = f"{reason}; what it had come to is lost"
            worker.record(Trained(item.job, {}, step, 0, lost), "failed", None, lost, own=False)
            continue
        tokens, best_step = waiting.meta["running"]["tokens"], waiting.meta["held"]["best_step"]
        trained = Trained(item.job, waiting.arrays["weights"], step, tokens)
        conclude(worker, trained, total_steps(item.job, len(item.examples)), best_step, "stopped", reason)
    left = [job_id for job_id in names if job_id not in reasons]
    if left:
        scale = next(reversed(journal.state.scale.values()), 1.0)
        rung = 1 + max(pack.get("rung") or 0 for pack in journal.state.packs.values())
        plan = plan_left(journal, worker.sweep, worker.base.config, worker.task(), left, scale, rung=rung)
        if plan is None:
            raise UserError("the data of a job that waits is not there")
        fault("rung")
        journal.add_plan({}, plan.to_dict()["packs"], scale=scale)
        told = {"jobs": len(left), "stopped": len(reasons), "packs": len(plan.packs)}
        worker.run.event("rung", rung=rung, **told, makespan_s=round(plan.makespan_s, 3))
    _clean(worker)


def _clean(worker: "Worker") -> None:
    """Delete states that nobody goes on from: of jobs that have ended, and those before the last rung."""
    state = worker.journal.state
    for job in (worker.run.path / FOLDER).glob("*"):
        kept = state.paused[job.name]["step"] if job.name in state.paused else None
        for step in job.glob("*"):
            if job.name in state.ended or step.name != str(kept):
                shutil.rmtree(step, ignore_errors=True)
        if not any(job.iterdir()):
            job.rmdir()
