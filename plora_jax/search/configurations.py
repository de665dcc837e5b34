"""From a search space to a list of jobs: grid, seeded random sample, or a literal list."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from plora_jax.config.schema import unknown
from plora_jax.config.space import EXCLUDES, RATIO, Axis, Range, job_field
from plora_jax.config.sweep import Sweep
from plora_jax.config.yamlfile import Faults
from plora_jax.errors import UserError
from plora_jax.jobs import JOB_FIELDS, Job

MAX_JOBS = 100_000
PLANNED = 64  # configurations that a search without a number of jobs is planned with


def search_jobs(sweep: Sweep, note: Callable[[str], None] = lambda text: None) -> list[Job]:
    """List the jobs of a sweep in a fixed order: every configuration, repeated with each of train.seeds.

    Configurations given twice are listed once; `note` is told so, and when a sample finds too few. A search whose
    jobs are not known beforehand (Optuna's, or within GPU-hours or tokens) is listed as the random draws that it
    is planned with, and that is noted; `plora_jax.search.suggest` draws those that are trained.

    Raises:
      UserError: the grid has more than 100,000 configurations.
    """
    search, fixed, seeds = sweep.search, dict(sweep.train.fixed), sweep.train.seeds
    axes = list(search.axes)
    if search.jobs is not None:
        points: list[dict[str, Any]] = [dict(job) for job in search.jobs]
    elif search.strategy != "grid":
        count = search.sample or (search.budget.jobs or PLANNED * (len(seeds) or 1)) // (len(seeds) or 1)
        points = list(_sample(axes, count, search.seed, fixed))
        if len(points) < count:
            asks = "search.sample" if search.sample else "search.budget"
            note(f"{asks} asks for {count} configurations and only {len(points)} differ")
        if search.strategy == "optuna":
            note(f"search.method: optuna draws as jobs end; planned as {len(points)} random configurations")
        elif search.sample is None and search.budget.jobs is None:
            note(f"search.budget ends the draws as it is used up; planned as {len(points)} configurations")
    else:
        points = list(_grid(axes))
    repeats: list[dict[str, Any]] = [{"seed": seed} for seed in seeds] or [{}]
    jobs = dict.fromkeys(make_job(over(fixed, point) | seed) for point in points for seed in repeats)
    twice = len(points) * len(repeats) - len(jobs)
    if twice:
        note(f"{twice} of {len(points) * len(repeats)} jobs are given twice and trained once")
    return list(jobs)


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
        raw = raw.tolist() if hasattr(raw, "tolist") else raw  # NumPy and JAX arrays
        whole = raw if isinstance(raw, (list, tuple, range)) else [raw]
        values = []
        for i, value in enumerate(whole):
            try:
                values.append(job_field(name, value))
            except ValueError as error:
                faults.add((name, i), str(error))
        if not len(whole):
            faults.add((name,), "is an empty list")
        spans.append((name, tuple(values)))
    for one, other in EXCLUDES:
        if one in axes and other in axes:
            faults.add((one,), f"contradicts {other}; keep one of them")
    faults.check()
    return list(dict.fromkeys(make_job(point) for point in _grid(spans)))


def make_job(values: dict[str, Any]) -> Job:
    """Build a job from checked values; alpha_ratio becomes alpha = ratio × rank."""
    values = dict(values)
    ratio = values.pop(RATIO, None)
    if ratio is not None:
        values["alpha"] = ratio * values.get("rank", JOB_FIELDS["rank"].default)
    return Job(**values)


def over(fixed: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Lay a point over what all jobs share; what it contradicts gives way, as epochs to max_steps."""
    gone = {other for pair in EXCLUDES for one, other in (pair, pair[::-1]) if one in point}
    return {name: value for name, value in fixed.items() if name not in gone} | point


def _grid(axes: Sequence[tuple[str, Axis]]) -> Iterator[dict[str, Any]]:
    spans = [axis for _, axis in axes if isinstance(axis, tuple)]
    count = math.prod(len(span) for span in spans)
    if count > MAX_JOBS:
        raise UserError(
            f"search: the grid has {count:,} configurations, more than {MAX_JOBS:,}; use `sample: N`"
        )
    names = [name for name, _ in axes]
    return (dict(zip(names, values, strict=True)) for values in itertools.product(*spans))


def _sample(
    axes: Sequence[tuple[str, Axis]], count: int, seed: int, fixed: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Draw points that make different jobs, as many as asked for or as there are."""
    count = min(count, space_size(axes, fixed))
    seen: set[Job] = set()
    for point in itertools.islice(draws(axes, seed), 100 * count + 1000):
        if len(seen) == count:
            return
        job = make_job(over(fixed, point))
        if job not in seen:
            seen.add(job)
            yield point


def space_size(axes: Sequence[tuple[str, Axis]], fixed: dict[str, Any]) -> int:
    """Count the different jobs of a space; 100,000 stands for more, and for a range of numbers that are not whole."""
    if any(isinstance(axis, Range) and not is_whole(name) for name, axis in axes):
        return MAX_JOBS
    spans = [
        (name, range(int(axis.low), int(axis.high) + 1) if isinstance(axis, Range) else axis)
        for name, axis in axes
    ]
    if math.prod(len(span) for _, span in spans) >= MAX_JOBS:
        return MAX_JOBS
    return len({make_job(over(fixed, point)) for point in _grid([(n, tuple(span)) for n, span in spans])})


def draws(axes: Sequence[tuple[str, Axis]], seed: int) -> Iterator[dict[str, Any]]:
    """Draw points without end, with repetitions; each axis has a stream of its own: adding one moves no other."""
    streams = [random.Random(f"{seed}/{name}") for name, _ in axes]
    while True:
        yield {name: _draw(name, axis, stream) for (name, axis), stream in zip(axes, streams, strict=True)}


def _draw(name: str, axis: Axis, stream: random.Random) -> Any:
    if isinstance(axis, tuple):
        return axis[int(stream.random() * len(axis))]
    whole = is_whole(name)
    low, high, u = axis.low, axis.high, stream.random()
    if axis.kind == "log_uniform":
        value = math.exp(math.log(low) + u * (math.log(high + whole) - math.log(low)))
    else:
        value = low + u * (high + whole - low)
    return min(int(value), int(high)) if whole else readable(value, axis)


def is_whole(name: str) -> bool:
    """Say whether a numeric field takes whole numbers."""
    return name != RATIO and JOB_FIELDS[name].type is not float


def readable(value: float, axis: Range) -> float:
    """Round a draw to four digits, which a person can read and write again, within its range."""
    return min(max(float(f"{value:.4g}"), axis.low), axis.high)
