"""Ask/tell search: jobs are drawn as slots fall free, at random or by Optuna from the scores so far."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from plora_jax.config.space import Axis, Range, SearchConfig
from plora_jax.config.sweep import Sweep
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.search.configurations import draws, is_whole, make_job, over, readable, space_size

if TYPE_CHECKING:
    import optuna

REDRAWS = 20  # duplicates in a row after which Optuna is given a random new point
NEEDS = {"cmaes": ("cmaes",), "gp": ("torch", "scipy"), "qmc": ("scipy",)}  # beside Optuna itself


@dataclass
class _Configuration:
    """Hold what is known of one configuration: its jobs that have not ended, and how the others did."""

    trial: "optuna.Trial | None"
    waiting: set[str]
    told: list[tuple[float | None, float]] = field(default_factory=list)  # score, fraction


class Suggester:
    """Draw the jobs of a sweep whose `search.method` is random or optuna, while it runs.

    The jobs are a function of the sweep and the sequence of asks and tells: a resumed run gives the same calls
    again (`ask_again` checks that). Asks within one micro-step should be one call, its tells before it, in the
    order of the journal. Jobs that are running count: Optuna's tpe keeps away from them (constant liar), gp
    integrates over their outcome.

    Raises:
      UserError: the method needs a package that is not installed.
    """

    def __init__(self, sweep: Sweep, higher_is_better: bool) -> None:
        search = sweep.search
        if search.strategy not in ("random", "optuna"):
            raise ValueError(f"a {search.strategy} is known beforehand; use search_jobs")
        self._axes, self._fixed = list(search.axes), dict(sweep.train.fixed)
        self._repeats = [{"seed": seed} for seed in sweep.train.seeds] or [{}]
        most = search.budget.jobs // len(self._repeats) if search.budget.jobs else search.sample
        size = space_size(self._axes, self._fixed)
        self._left = size if most is None else min(most, size)
        self._stream = draws(self._axes, search.seed)
        self._study = _Study(search, higher_is_better) if search.strategy == "optuna" else None
        self._seen: set[Job] = set()
        self._pending: list[Job] = []
        self._configurations: dict[str, _Configuration] = {}

    def ask(self, n: int) -> list[Job]:
        """Return the next n jobs, fewer when `budget.jobs` or the space is exhausted; never one twice."""
        while len(self._pending) < n and self._left:
            if (found := self._draw()) is None:
                self._left = 0
                break
            self._left -= 1
            trial, point = found
            jobs = [make_job(over(self._fixed, point) | repeat) for repeat in self._repeats]
            configuration = _Configuration(trial, {job.job_id for job in jobs})
            self._configurations |= dict.fromkeys(configuration.waiting, configuration)
            self._pending += jobs
        out, self._pending = self._pending[:n], self._pending[n:]
        return out

    def ask_again(self, job_ids: Sequence[str]) -> list[Job]:
        """Ask as an earlier process did, and return the same jobs.

        Raises:
          UserError: other jobs are drawn, as by another version of Optuna.
        """
        jobs = self.ask(len(job_ids))
        if [job.job_id for job in jobs] != list(job_ids):
            raise UserError(
                "search: the jobs drawn now are not those of the run that is resumed; "
                "resume it with the version of Optuna that it was started with"
            )
        return jobs

    def tell(self, job_id: str, score: float | None, fraction: float = 1.0) -> None:
        """Say how a job ended: its score, and the share of its training that it did before it was stopped.

        None is a job that failed for a reason not its own (a lost machine): it teaches nothing. A score that is
        not finite is a job that diverged: as bad as can be. A job that was stopped (fraction < 1) is told as
        pruned: tpe ranks those behind all completed jobs, by how far they came and then by score; gp, cmaes and
        qmc learn from completed jobs alone. With train.seeds a configuration is told when all of its jobs ended,
        with their mean score.
        """
        configuration = self._configurations[job_id]
        if job_id not in configuration.waiting:
            raise ValueError(f"{job_id} was told before")
        configuration.waiting.discard(job_id)
        configuration.told.append((score, fraction))
        if self._study and not configuration.waiting:
            scores = [score for score, _ in configuration.told if score is not None]
            whole = len(scores) == len(configuration.told)
            reached = min(fraction for _, fraction in configuration.told)
            self._study.tell(configuration.trial, fmean(scores) if whole else None, reached)

    def _draw(self) -> "tuple[optuna.Trial | None, dict[str, Any]] | None":
        """Draw a point whose job is new; None when none is found."""
        for _ in range(REDRAWS if self._study else 0):
            assert self._study is not None
            trial, point = self._study.ask()
            if self._claim(point):
                return trial, point
            self._study.tell(trial, None, 1.0)
        new = (point for point in islice(self._stream, 100 * len(self._seen) + 10_000) if self._claim(point))
        if (fresh := next(new, None)) is None:
            return None
        return (self._study.ask(fresh)[0] if self._study else None), fresh

    def _claim(self, point: dict[str, Any]) -> bool:
        """Say whether a point's job is new, and count it as drawn."""
        job = make_job(over(self._fixed, point))
        new = job not in self._seen
        self._seen.add(job)
        return new


class _Study:
    """Wrap Optuna's study: axes as its distributions, and points in our words."""

    def __init__(self, search: SearchConfig, higher_is_better: bool) -> None:
        names = ("optuna", *NEEDS.get(search.sampler, ()))
        if missing := [name for name in names if find_spec(name) is None]:
            extra = "pip install torch" if "torch" in missing else "pip install 'plora-jax[optuna]'"
            asked = "method: optuna" if "optuna" in missing else f"sampler: {search.sampler}"
            raise UserError(f"search.{asked} needs the package {' and '.join(missing)}: {extra}")
        import optuna

        self._optuna = optuna
        self._axes = {name: _Axis(name, axis) for name, axis in search.axes}
        self._space = {name: axis.distribution(optuna) for name, axis in self._axes.items()}
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            sampler=_sampler(optuna, search), direction="maximize" if higher_is_better else "minimize"
        )
        optuna.logging.set_verbosity(verbosity)

    def ask(self, point: dict[str, Any] | None = None) -> "tuple[optuna.Trial, dict[str, Any]]":
        """Begin a trial, at a given point or at the sampler's."""
        if point is not None:
            self._study.enqueue_trial({name: axis.encode(point[name]) for name, axis in self._axes.items()})
        trial = self._study.ask(self._space)
        return trial, {name: axis.decode(trial.params[name]) for name, axis in self._axes.items()}

    def tell(self, trial: Any, score: float | None, fraction: float) -> None:
        """End a trial; see Suggester.tell."""
        state = self._optuna.trial.TrialState
        if score is None:
            self._study.tell(trial, state=state.FAIL)
        elif math.isfinite(score) and fraction >= 1:
            self._study.tell(trial, score)
        else:  # pruned; without a report, tpe ranks a trial behind all others
            if math.isfinite(score):
                trial.report(score, round(1e6 * fraction))
            self._study.tell(trial, state=state.PRUNED)


class _Axis:
    """Translate one axis: a list of numbers is an ordered scale to Optuna, other lists are categories."""

    def __init__(self, name: str, axis: Axis) -> None:
        self.axis, self.whole = axis, is_whole(name)
        self.values: list[Any] = []
        if isinstance(axis, tuple):
            values = list(dict.fromkeys(axis))
            self.ordered = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
            self.values = sorted(values) if self.ordered else values

    def distribution(self, optuna: Any) -> Any:
        """Return Optuna's distribution; lists are drawn by index."""
        kinds = optuna.distributions
        if isinstance(self.axis, Range):
            log = self.axis.kind == "log_uniform"
            if self.whole:
                return kinds.IntDistribution(int(self.axis.low), int(self.axis.high), log=log)
            return kinds.FloatDistribution(self.axis.low, self.axis.high, log=log)
        indices = range(len(self.values))
        return (
            kinds.IntDistribution(0, indices[-1]) if self.ordered else kinds.CategoricalDistribution(indices)
        )

    def decode(self, drawn: Any) -> Any:
        """Return the field's value."""
        if isinstance(self.axis, Range):
            return drawn if self.whole else readable(drawn, self.axis)
        return self.values[drawn]

    def encode(self, value: Any) -> Any:
        """Return what Optuna draws for a value."""
        return value if isinstance(self.axis, Range) else self.values.index(value)


def _sampler(optuna: Any, search: SearchConfig) -> Any:
    """Return the seeded sampler; whatever concerns jobs asked for side by side is Optuna's own."""
    kinds, seed = optuna.samplers, search.seed
    if search.sampler == "tpe":
        return kinds.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    if search.sampler == "qmc":
        with warnings.catch_warnings():  # experimental by Optuna's own word, since 2021
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return kinds.QMCSampler(scramble=True, seed=seed, warn_independent_sampling=False)
    if search.sampler == "cmaes":
        return kinds.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    return {"gp": kinds.GPSampler, "random": kinds.RandomSampler}[search.sampler](seed=seed)
