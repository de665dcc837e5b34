"""The search space of a sweep: axes, samples, literal lists, and what all jobs share, read and checked."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, cast

from plora_jax.config.schema import allowed, convert, section, unknown
from plora_jax.config.yamlfile import Faults, Place, shown
from plora_jax.jobs import JOB_FIELDS


def setting(default: Any, doc: str, **meta: Any) -> Any:
    """Make a dataclass field that carries its own documentation and limits, as Job's fields do."""
    return field(default=default, metadata={"doc": doc, **meta})


RATIO = "alpha_ratio"
RATIO_META = {"doc": "alpha = alpha_ratio × rank", "low": 0.0, "open_low": True}
# What an init_adapter brings along.
FRESH = ("rank", "alpha", RATIO, "use_rslora", "targets", "rank_pattern", "alpha_pattern")
# Pairs of which one overrules the other: giving both is a contradiction, not a preference.
EXCLUDES = [("alpha", RATIO), ("max_steps", "epochs"), ("warmup_steps", "warmup_ratio"), ("seed", "seeds")]
EXCLUDES += [("init_adapter", name) for name in FRESH]
ADAMW = ("adamw", "adamw_bf16")
ONLY_WITH = {"momentum": ("sgd",), "beta1": ADAMW, "beta2": ADAMW, "eps": ADAMW}
NULLABLE = {name for name, spec in JOB_FIELDS.items() if spec.default is None}  # null means not given
PATTERNS = ("rank_pattern", "alpha_pattern")
SEARCHABLE = [name for name in JOB_FIELDS if name != "seed"] + [RATIO]  # search.seed is the sampler's
BELONGS = {name: "search or train" for name in [*JOB_FIELDS, RATIO] if name not in ("train", "seed")}
BELONGS |= {
    "sample": "search",
    "budget": "search",
    "sampler": "search",
    "gpu_hours": "search.budget",
    "tokens": "search.budget",
    "jobs": "search",
    "seeds": "train",
    "seed": "train or search",
    "keep": "train",
    "slots": "train",
}


@dataclass(frozen=True)
class Range:
    """Draw values between two ends, both included."""

    kind: Literal["uniform", "log_uniform"]
    low: float
    high: float


Axis = tuple[Any, ...] | Range


class Spent(NamedTuple):
    """Count what a sweep has used: jobs begun, seconds of device time, tokens trained."""

    jobs: int = 0
    device_seconds: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True)
class Budget:
    """Limit a search; no job is begun after the first limit is reached, and those that run are finished."""

    jobs: int | None = setting(None, "jobs to train, repeats over train.seeds included", low=1, high=100_000)
    gpu_hours: float | None = setting(None, "hours of device time", low=0.0, open_low=True)
    tokens: float | None = setting(None, "tokens to train", low=0.0, open_low=True)

    def left(self, spent: Spent) -> bool:
        """Say whether another job may begin."""
        used = (
            (self.jobs, spent.jobs),
            (self.gpu_hours, spent.device_seconds / 3600),
            (self.tokens, spent.tokens),
        )
        return all(limit is None or count < limit for limit, count in used)


@dataclass(frozen=True)
class SearchConfig:
    """Span the configurations: axes of job fields and how they are drawn from, or a literal list."""

    axes: tuple[tuple[str, Axis], ...] = ()
    method: Literal["grid", "random", "optuna"] | None = setting(
        None, "every combination, random draws, or Optuna's; none: random with `sample`, else grid"
    )
    sampler: Literal["tpe", "gp", "cmaes", "qmc", "random"] = setting("tpe", "the sampler of method: optuna")
    sample: int | None = setting(
        None, "how many different configurations to draw at random", low=1, high=100_000
    )
    budget: Budget = Budget()
    seed: int = setting(0, "draws the configurations, nothing else", low=0, high=2**31 - 1)
    jobs: tuple[tuple[tuple[str, Any], ...], ...] | None = None

    @property
    def strategy(self) -> str:
        """Return how the jobs are found: list, grid, random or optuna."""
        return (
            "list" if self.jobs is not None else self.method or ("grid" if self.sample is None else "random")
        )

    @property
    def is_drawn(self) -> bool:
        """Tell whether the jobs become known only as slots fall free."""
        return self.strategy == "optuna" or (self.budget.gpu_hours, self.budget.tokens) != (None, None)


@dataclass(frozen=True)
class TrainConfig:
    """Hold what every job shares: `fixed` job fields, repeats over seeds, which adapter is kept, and slots."""

    fixed: tuple[tuple[str, Any], ...] = ()
    seeds: tuple[int, ...] = setting(
        (), "repeat every configuration with each seed; ranked by the mean", low=0, high=2**31 - 1
    )
    keep: Literal["best", "last"] = setting(
        "best",
        "export the adapter of the best evaluation, or the last one; without `eval` and `early_stop` both are it",
    )
    slots: int | None = setting(
        None,
        "most jobs side by side in a pack; fewer than jobs: early stopping lets the next ones in sooner. None: as many "
        "as are fastest when nothing is stopped",
        low=1,
    )


def job_field(name: str, value: Any) -> Any:
    """Return a value of a job field or alpha_ratio in its own type; a ValueError says what is allowed."""
    if name == RATIO:
        return convert(value, float, RATIO_META)
    out = convert(value, JOB_FIELDS[name].type, JOB_FIELDS[name].metadata)
    if name == "targets":
        names = [out] if isinstance(out, str) else list(out)
        if not names or not all(names) or len(set(names)) < len(names):
            raise ValueError(f"{shown(value)} must name modules, each once; expected {describe_field(name)}")
        if "all-linear" in names:
            if len(names) > 1:
                raise ValueError("all-linear already means every linear module; give it alone")
            return "all-linear"
        return tuple(sorted(names))
    return out


def describe_field(name: str) -> str:
    """Say in words what a job field accepts."""
    if name == RATIO:
        return allowed(float, RATIO_META)
    return allowed(JOB_FIELDS[name].type, JOB_FIELDS[name].metadata)


def field_lines() -> list[str]:
    """Describe every job field in a line: its name, what is allowed, the default, the meaning."""
    width = max(map(len, JOB_FIELDS))
    lines = []
    for name, spec in JOB_FIELDS.items():
        default = "" if spec.default in (None, "", ()) else f"; default {str(spec.default).lower()}"
        words = describe_field(name).removesuffix(" or null")
        lines.append(f"{name.ljust(width)}  {spec.metadata['doc']} ({words}{default})")
    return lines


def _check_pairs(where: Place, given: set[str], faults: Faults) -> None:
    for one, other in EXCLUDES:
        if one in given and other in given:
            faults.add((*where, one), f"contradicts {other}; keep one of them")


def _job_fields(
    raw: dict[str, Any], where: Place, faults: Faults, belongs: dict[str, str], extra: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check single values of job fields; keys in `extra` are the caller's."""
    out = {}
    for key, value in raw.items():
        if key in extra or (value is None and key in NULLABLE):
            continue
        if key not in JOB_FIELDS and key != RATIO:
            faults.add((*where, key), unknown(key, [*JOB_FIELDS, RATIO, *extra], belongs))
            continue
        try:
            out[key] = job_field(key, value)
        except ValueError as error:
            hint = "; to try several values, list them under search" if isinstance(value, list) else ""
            faults.add((*where, key), f"{error}{hint}")
    return out


def read_train(raw: Any, faults: Faults, belongs: dict[str, str]) -> TrainConfig:
    """Check the section `train`: any job field, seeds, keep, and slots."""
    if raw is None:
        return TrainConfig()
    if not isinstance(raw, dict):
        faults.add(
            ("train",), f"{shown(raw)} is not a mapping; expected such as {{epochs: 1, scheduler: cosine}}"
        )
        return TrainConfig()
    raw = dict(raw)
    if raw.pop("train", None) is not None:
        faults.add(("train", "train"), "the training rows of the sweep belong under data.train")
    fixed = _job_fields(raw, ("train",), faults, belongs, ("seeds", "keep", "slots"))
    own = {f.name: f for f in fields(TrainConfig) if f.metadata}
    rest = section({k: v for k, v in raw.items() if k in own}, ("train",), own, faults, {})
    if "seeds" in rest and (not rest["seeds"] or len(set(rest["seeds"])) < len(rest["seeds"])):
        faults.add(("train", "seeds"), f"{shown(list(rest['seeds']))} must be different seeds, at least one")
    _check_pairs(("train",), {*fixed, *rest}, faults)
    return TrainConfig(tuple(fixed.items()), **rest)


def _axis(name: str, raw: Any, where: Place, faults: Faults) -> Axis:
    """Read one axis: a list of values, one value, or a range."""
    if isinstance(raw, dict) and name not in PATTERNS:
        try:
            return _range(name, raw)
        except ValueError as error:
            faults.add(where, str(error))
            return ()
    values = raw if isinstance(raw, list) else [raw]
    if not values:
        faults.add(where, f"is an empty list; give at least one value: {describe_field(name)}")
    out = []
    for i, value in enumerate(values):
        try:
            out.append(job_field(name, value))
        except ValueError as error:
            faults.add((*where, i) if isinstance(raw, list) else where, str(error))
    return tuple(out)


def _range(name: str, raw: dict[str, Any]) -> Range:
    if name != RATIO and JOB_FIELDS[name].type not in (int, float, int | None):
        raise ValueError(f"a range needs a numeric field; list the values: {describe_field(name)}")
    if len(raw) != 1 or next(iter(raw)) not in ("uniform", "log_uniform"):
        raise ValueError(
            f"{shown(raw)} is not a range; expected {{uniform: [low, high]}} or {{log_uniform: [low, high]}}"
        )
    [(kind, ends)] = raw.items()
    if not isinstance(ends, list) or len(ends) != 2 or None in ends:
        raise ValueError(f"{kind}: {shown(ends)} is not a range; expected [low, high]")
    low, high = (job_field(name, end) for end in ends)
    if not low < high or (kind == "log_uniform" and low <= 0):
        raise ValueError(
            f"{kind}: {shown(ends)} must rise{' and start above 0' if kind == 'log_uniform' else ''}"
        )
    return Range(cast(Literal["uniform", "log_uniform"], kind), low, high)


def read_search(
    raw: dict[str, Any], train: TrainConfig, faults: Faults, belongs: dict[str, str]
) -> SearchConfig:
    """Check the section `search` of the whole file `raw`, and that it agrees with `train`."""
    found = raw.get("search")
    if found is not None and not isinstance(found, dict):
        faults.add(
            ("search",),
            f"{shown(found)} is not a mapping; expected axes such as {{rank: [8, 16]}}, or jobs: [...]",
        )
    found = dict(found) if isinstance(found, dict) else {}
    where: Place = ("search", "jobs")
    if "jobs" in raw:
        if "jobs" in found:
            faults.add(("jobs",), "is given at the top and under search; keep one of them")
        found["jobs"], where = raw["jobs"], ("jobs",)
    own = {f.name: f for f in fields(SearchConfig) if f.metadata}
    rest = section({k: v for k, v in found.items() if k in own}, ("search",), own, faults, {})
    limits = {f.name: f for f in fields(Budget)}
    rest["budget"] = Budget(**section(found.get("budget"), ("search", "budget"), limits, faults, belongs))
    axes: list[tuple[str, Axis]] = []
    keys = [*own, "budget", "jobs"]
    for key, value in found.items():
        if key in SEARCHABLE:
            axes.append((key, _axis(key, value, ("search", key), faults)))
        elif key not in keys:
            faults.add(("search", key), unknown(key, [*SEARCHABLE, *keys], belongs))
    given, fixed = {name for name, _ in axes}, dict(train.fixed)
    for name in sorted(given & set(fixed)):
        faults.add(("search", name), "is fixed under train as well; keep one of them")
    for one, other in EXCLUDES:
        for here, there in ((one, other), (other, one)):
            if here in given and (there in fixed or (there in given and here == one)):
                faults.add(
                    ("search", here),
                    f"contradicts {'train.' if there in fixed else ''}{there}; keep one of them",
                )
    jobs = None
    if "jobs" in found:
        if axes or set(found) - {"jobs", "seed"}:
            others = [name for name in found if name not in ("jobs", "seed")]
            faults.add(where, f"a literal list excludes {', '.join(others)}")
        jobs = _literal(found["jobs"], where, bool(train.seeds), faults, belongs)
    search = SearchConfig(tuple(axes), jobs=jobs, **rest)
    if jobs is None and (found.get("method") is None or "method" in rest):
        _check_method(search, {key for key, value in found.items() if value not in (None, {})}, train, faults)
    _check_unused(fixed, axes, jobs, faults)
    return search


def _check_method(search: SearchConfig, given: set[str], train: TrainConfig, faults: Faults) -> None:
    """Refuse what the way of drawing does not read, and what it lacks."""
    method, budget = search.strategy, search.budget
    if "sampler" in given and method != "optuna":
        faults.add(("search", "sampler"), "has no effect without method: optuna")
    if "sample" in given and method != "random":
        instead = "give budget: {jobs: N}" if method == "optuna" else "use method: random or leave it out"
        faults.add(("search", "sample"), f"has no effect with method: {method}; {instead}")
    if "budget" in given and method == "grid":
        faults.add(("search", "budget"), "needs method: random or optuna; a grid is trained whole")
    if method == "grid":
        for name, axis in search.axes:
            if isinstance(axis, Range):
                faults.add(
                    ("search", name), "a range needs `sample: N` or a method that draws; or list the values"
                )
        return
    if "sample" in given and budget.jobs is not None:
        faults.add(("search", "sample"), "contradicts budget.jobs; keep one of them")
    if search.sample is None and "budget" not in given:
        faults.add(("search", "budget"), f"is missing; method: {method} needs one such as {{jobs: 40}}")
    if budget.jobs is not None and budget.jobs < len(train.seeds):
        faults.add(
            ("search", "budget", "jobs"),
            f"{budget.jobs} is less than one configuration with each of {len(train.seeds)} train.seeds",
        )
    if method == "optuna" and not any(isinstance(axis, Range) or len(axis) > 1 for _, axis in search.axes):
        faults.add(
            ("search",), "method: optuna needs an axis with two values or a range, such as rank: [8, 16]"
        )


def _literal(
    raw: Any, where: Place, seeds: bool, faults: Faults, belongs: dict[str, str]
) -> tuple[tuple[tuple[str, Any], ...], ...]:
    if not isinstance(raw, list) or not raw:
        faults.add(
            where,
            f"{shown(raw)} is not a list of jobs; expected such as [{{rank: 8, learning_rate: 0.0002}}]",
        )
        return ()
    out = []
    for i, item in enumerate(raw):
        if not isinstance(item, dict):
            faults.add(
                (*where, i),
                f"{shown(item)} is not a job; expected such as {{rank: 8, learning_rate: 0.0002}}",
            )
            continue
        own = _job_fields(item, (*where, i), faults, belongs)
        _check_pairs((*where, i), set(own), faults)
        if "seed" in own and seeds:
            faults.add((*where, i, "seed"), "contradicts train.seeds; keep one of them")
        out.append(tuple(own.items()))
    return tuple(out)


def optimizers(fixed: dict[str, Any], axes: Any, jobs: Any) -> set[str]:
    """Name the optimizers that the jobs of a sweep use."""
    kinds = {fixed.get("optimizer", JOB_FIELDS["optimizer"].default)}
    kinds |= {value for job in jobs or () for name, value in job if name == "optimizer"}
    return set(dict(axes).get("optimizer", kinds))


def _check_unused(fixed: dict[str, Any], axes: list[tuple[str, Axis]], jobs: Any, faults: Faults) -> None:
    """Refuse an optimizer's setting that no job of the sweep would read."""
    kinds = optimizers(fixed, axes, jobs)
    for name, readers in ONLY_WITH.items():
        if kinds.isdisjoint(readers):
            for where, given in (("train", fixed), ("search", dict(axes))):
                if name in given:
                    faults.add((where, name), f"has no effect without optimizer: {' or '.join(readers)}")
