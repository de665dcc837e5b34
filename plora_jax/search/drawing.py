"""Jobs that are drawn while the sweep runs: what the space can ask of a program, and the next job of a free slot."""

import time
from collections.abc import Callable
from typing import Any

from plora_jax.config.space import Range, Spent
from plora_jax.config.sweep import Sweep
from plora_jax.engine.journal import Journal, RunState
from plora_jax.jobs import Job
from plora_jax.search.configurations import make_job, over
from plora_jax.search.suggest import Suggester


def corner_jobs(sweep: Sweep) -> list[Job]:
    """Return jobs whose needs together are the most that any job of the space can ask for."""
    spans = {
        name: (axis.low, axis.high) if isinstance(axis, Range) else axis for name, axis in sweep.search.axes
    }
    middle = {name: values[-1] for name, values in spans.items()}
    points = [middle | {name: value} for name, values in spans.items() for value in values]
    return [make_job(over(dict(sweep.train.fixed), point)) for point in points or [{}]]


class Drawer:
    """Draw the next job of a sweep whose jobs are not known beforehand.

    Every ask and every tell is in the journal; a process that joins later makes them again first, so that all have
    the same search. Call it with the journal locked.

    `tokens` tells how many tokens a job of the journal trains when nothing stops it.
    """

    def __init__(
        self, sweep: Sweep, journal: Journal, higher_is_better: bool, tokens: Callable[[str], float]
    ) -> None:
        self.sweep, self.journal, self.tokens = sweep, journal, tokens
        self._suggester = Suggester(sweep, higher_is_better)
        self._done = 0  # lines of the state's search that are made again

    def draw(self, state: RunState, place: dict[str, Any]) -> str | None:
        """Ask for a job, and place it by the same line of the journal; None when the space or a budget is used up."""
        for kind, arguments in state.search[self._done :]:
            if kind == "ask":
                self._suggester.ask_again(arguments)
            else:
                self._suggester.tell(*arguments)
        self._done = len(state.search)
        if not self.sweep.search.budget.left(self._spent(state)):
            return None
        found = self._suggester.ask(1)
        if not found:
            return None
        (job,) = found
        self.journal.extend(
            [
                ("jobs", {"jobs": {job.job_id: job.to_dict()}, "asked": [job.job_id]}),
                ("place", place | {"job_id": job.job_id}),
            ]
        )
        self._done = len(state.search)
        return job.job_id

    def _spent(self, state: RunState) -> Spent:
        """Count what the jobs so far have used, and what those that run will use at most."""
        running = [job_id for job_id in state.jobs if job_id not in state.ended]
        tokens = sum(state.tokens.values()) + sum(map(self.tokens, running))
        device_s = state.device_s + sum(time.time() - since for since in state.begun.values())
        return Spent(jobs=len(state.jobs), device_seconds=device_s, tokens=tokens)
