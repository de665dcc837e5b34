"""From a search space to a list of jobs: grid, seeded random sample, or a literal list."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from plora_jax.config import RATIO, Axis, Range, Sweep, job_field
from plora_jax.errors import UserError
from plora_jax.jobs import JOB_FIELDS, Job
from plora_jax.schema import Faults, unknown

MAX_JOBS = 100_000


class Found(NamedTuple):
    """Hold the jobs of a sweep, in a fixed order without duplicates, and what the reader should know."""

    jobs: list[Job]
    notes: list[str]


def find_jobs(sweep: Sweep) -> Found:
    """List the jobs of a sweep: every configuration, repeated with each of train.seeds.

    Raises:
      UserError: the grid has more than 100,000 jobs.
    """
    search, fixed, notes = sweep.search, dict(sweep.train.fixed), []
    axes = list(search.axes)
    if search.jobs is not None:
        points: Iterable[dict[str, Any]] = (dict(job) for job in search.jobs)
    elif search.sample is not None:
        points = _sample(axes, search.sample, search.seed, fixed)
    else:
        points = _grid(axes)
    seeds = sweep.train.seeds
    wanted = 0
    jobs: dict[Job, None] = {}
    for point in points:
        for seed in seeds or (None,):
            wanted += 1
            jobs.setdefault(make_job(_over(fixed, point) | ({} if seed is None else {"seed": seed})))
    if search.sample is not None and wanted < search.sample * max(1, len(seeds)):
        notes.append(
            f"search.sample asks for {search.sample} configurations and only {wanted // max(1, len(seeds))} differ"
        )
    if len(jobs) < wanted:
        notes.append(f"{wanted - len(jobs)} of {wanted} configurations were given twice and are trained once")
    return Found(list(jobs), notes)


def grid(**axes: Any) -> list[Job]:
    """Return one job for each combination of the given values; a single value stands for itself.

    Example: `grid(learning_rate=[1e-4, 2e-4], rank=[8, 32], alpha_ratio=2)`.

    Raises:
      UserError: names every field and value that is not allowed, and what is.
    """
    faults, spans = Faults("grid"), []
    for name, raw in axes.items():
        if name not in JOB_FIELDS and name != RATIO:
            faults.add((name,), unknown(name, [*JOB_FIELDS, RATIO]))
            continue
        whole = raw if isinstance(raw, (list, tuple, range)) or hasattr(raw, "tolist") else [raw]
        values = []
        for i, value in enumerate(whole.tolist() if hasattr(whole, "tolist") else whole):
            try:
                values.append(job_field(name, value))
            except ValueError as error:
                faults.add((name, i), str(error))
        if not len(whole):
            faults.add((name,), "is an empty list")
        spans.append((name, tuple(values)))
    if RATIO in axes and "alpha" in axes:
        faults.add(("alpha",), f"contradicts {RATIO}; keep one of them")
    faults.check()
    return list(dict.fromkeys(make_job(point) for point in _grid(spans)))


def make_job(values: dict[str, Any]) -> Job:
    """Build a job from checked values; alpha_ratio becomes alpha = ratio × rank."""
    values = dict(values)
    ratio = values.pop(RATIO, None)
    if ratio is not None:
        values["alpha"] = ratio * values.get("rank", JOB_FIELDS["rank"].default)
    return Job(**values)


def _over(fixed: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Lay a point over what all jobs share: alpha and alpha_ratio replace one another."""
    drop = {RATIO: "alpha", "alpha": RATIO}
    return {k: v for k, v in fixed.items() if drop.get(k) not in point} | point


def _grid(axes: list[tuple[str, Axis]]) -> Iterator[dict[str, Any]]:
    spans = [axis for _, axis in axes if isinstance(axis, tuple)]
    count = math.prod(len(span) for span in spans)
    if count > MAX_JOBS:
        raise UserError(
            f"search: the grid has {count:,} configurations, more than {MAX_JOBS:,}; use `sample: N`"
        )
    names = [name for name, _ in axes]
    return (dict(zip(names, values, strict=True)) for values in itertools.product(*spans))


def _sample(
    axes: list[tuple[str, Axis]], count: int, seed: int, fixed: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Draw different points. Each axis has its own stream, so adding one leaves the draws of the others."""
    streams = [random.Random(f"{seed}/{name}") for name, _ in axes]
    seen: set[Job] = set()
    if all(isinstance(axis, tuple) for _, axis in axes):
        size = len({make_job(_over(fixed, p)) for p in _grid(axes)}) if _size(axes) <= MAX_JOBS else count
        count = min(count, size)
    for _ in range(100 * count + 1000):
        if len(seen) == count:
            return
        point = {name: _draw(name, axis, stream) for (name, axis), stream in zip(axes, streams, strict=True)}
        job = make_job(_over(fixed, point))
        if job not in seen:
            seen.add(job)
            yield point


def _size(axes: list[tuple[str, Axis]]) -> int:
    return math.prod(len(axis) for _, axis in axes if isinstance(axis, tuple))


def _draw(name: str, axis: Axis, stream: random.Random) -> Any:
    if isinstance(axis, tuple):
        return axis[int(stream.random() * len(axis))]
    whole = name != RATIO and JOB_FIELDS[name].type is not float
    low, high, u = axis.low, axis.high, stream.random()
    if axis.kind == "log_uniform":
        value = math.exp(math.log(low) + u * (math.log(high + whole) - math.log(low)))
    else:
        value = low + u * (high + whole - low)
    if whole:
        return min(int(value), int(high))
    return min(max(float(f"{value:.4g}"), low), high)  # four digits: what a person can read and write again
