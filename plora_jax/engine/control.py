"""Change a sweep that is running: add jobs to it, and withdraw jobs from it."""

from pathlib import Path

from rich.console import Console

from planner import render_plan
from plora_jax.config.sweep import load_added
from plora_jax.engine.journal import Journal
from plora_jax.engine.progress import make_console, say
from plora_jax.engine.rundir import RunDirectory, is_run, is_running
from plora_jax.engine.task import read_task, start_adapters
from plora_jax.errors import UserError
from plora_jax.models.find import load_config, load_tokenizer
from plora_jax.planning import first_packs, plan_jobs
from plora_jax.search.configurations import search_jobs


def add_jobs(run: Path, jobs_file: Path, console: Console | None = None) -> int:
    """Add the jobs of a YAML file (sections `search`, `train`, or a list `jobs`) to a run, and return the exit code.

    Model, data and all else are the run's. Workers take the jobs up as soon as a slot or a device is free.

    Raises:
      UserError: this is no run, the file is faulty, or no plan is possible.
    """
    console = console or make_console()
    journal = _open(run)
    sweep = load_added(jobs_file, run / "sweep.yaml")
    config, tokenizer = load_config(sweep.model), load_tokenizer(sweep.model)
    jobs, _ = start_adapters(sweep, config, search_jobs(sweep, lambda text: say(console, f"note: {text}")))
    known = journal.refresh().jobs
    new = [job for job in jobs if job.job_id not in known]
    if not new:
        raise UserError(f"{jobs_file}: all {len(jobs)} jobs are in this run already")
    task = read_task(sweep, new, tokenizer, config.vocab_size, console)
    scored = {job.job_id: task.eval.tokens for job in new}
    plan = plan_jobs(sweep, config, new, task.train, scored, journal.devices)
    say(console, render_plan(plan))
    journal.add_plan({job.job_id: job.to_dict() for job in new}, first_packs(plan))
    RunDirectory(run).event("added", jobs=[job.job_id for job in new])
    then = (
        ""
        if is_running(run)
        else f"; the run has ended: plora sweep … --out {run} --resume goes on with them"
    )
    say(console, f"{len(new)} jobs added to {run}{then}")
    journal.close()
    return 0


def stop_job(run: Path, name: str, console: Console | None = None) -> int:
    """Withdraw a job, named by its id or the beginning of it, and return the exit code.

    A running job keeps its best adapter; one that has not begun never will.

    Raises:
      UserError: this is no run, it has no such job or several, or the job has ended.
    """
    console = console or make_console()
    journal = _open(run)
    with journal.locked() as state:
        found = [job_id for job_id in state.jobs if job_id.startswith(name)]
        if name in state.jobs:
            found = [name]
        if len(found) != 1:
            several = (
                f"{len(found)} jobs begin so: {', '.join(found[:5])}" if found else "there is no such job"
            )
            raise UserError(f"{name}: {several} in {run}")
        if found[0] in state.ended:
            raise UserError(f"{found[0]} has ended already ({state.ended[found[0]]})")
        journal.append("withdraw", job_id=found[0])
    RunDirectory(run).event("withdrawn", job_id=found[0])
    say(console, f"{found[0]} is withdrawn")
    journal.close()
    return 0


def _open(run: Path) -> Journal:
    if not is_run(run) or not (run / "journal.jsonl").exists():
        raise UserError(f"{run}: this is no run of a sweep")
    return Journal(run / "journal.jsonl")
