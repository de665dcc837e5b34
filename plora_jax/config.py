"""A sweep as the user wrote it: SWEEP.yaml read, checked as a whole, and written back with every value in force."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from plora_jax.jobs import JOB_FIELDS
from plora_jax.schema import (
    Faults,
    Path_,
    allowed,
    convert,
    dump_yaml,
    parse_yaml,
    read_yaml,
    section,
    shown,
    unknown,
)

METRICS = ("loss", "choice_accuracy", "exact_match")


def _f(default: Any, doc: str, **meta: Any) -> Any:
    return field(default=default, metadata={"doc": doc, **meta})


def _need(doc: str, **meta: Any) -> Any:
    return field(metadata={"doc": doc, **meta})


@dataclass(frozen=True)
class DataConfig:
    """Name the rows to train on, to choose by and to report on, and how they are read."""

    train: str = _need("training rows: a file, or a Hugging Face data set name")
    eval: str = _f("", "held-out rows that the best job is chosen by")
    test: str = _f("", "other held-out rows; the base model and the best job are scored on them once")
    max_length: int = _f(1024, "longest row in tokens", low=8, high=1_048_576)
    metric: str = _f(
        "loss", "what ranks the jobs", allowed=f"one of {', '.join(METRICS)}, or module:function"
    )
    choices: tuple[str, ...] = _f((), "the answers of choice_accuracy, where a row does not list its own")
    format: Literal["auto", "chat", "prompt_completion", "alpaca", "text"] = _f("auto", "how a row is read")
    on_long: Literal["truncate", "drop", "error"] = _f(
        "truncate", "what happens to a row longer than max_length"
    )
    on_bad_row: Literal["error", "skip"] = _f("error", "what happens to a row that cannot be read")
    buckets: tuple[int, ...] = _f(
        (), "row lengths to compile for, the last one max_length; none: chosen", low=8
    )
    rows: int | None = _f(None, "training rows that `plora plan` counts while the file is not there", low=1)


@dataclass(frozen=True)
class Range:
    """Draw values between two ends, both included."""

    kind: Literal["uniform", "log_uniform"]
    low: float
    high: float


Axis = tuple[Any, ...] | Range


@dataclass(frozen=True)
class SearchConfig:
    """Span the configurations: axes of job fields (a grid, or `sample` draws from it), or a literal list."""

    axes: tuple[tuple[str, Axis], ...] = ()
    sample: int | None = _f(
        None, "how many configurations to draw; none: the whole grid", low=1, high=100_000
    )
    seed: int = _f(0, "draws the sample, nothing else", low=0, high=2**31 - 1)
    jobs: tuple[tuple[tuple[str, Any], ...], ...] | None = None


@dataclass(frozen=True)
class TrainConfig:
    """Hold what every job shares: `fixed` job fields, repeats over seeds, and which adapter is kept."""

    fixed: tuple[tuple[str, Any], ...] = ()
    seeds: tuple[int, ...] = _f(
        (), "repeat every configuration with each seed; ranked by the mean", low=0, high=2**31 - 1
    )
    keep: Literal["best", "last"] = _f("best", "export the adapter of the best evaluation, or the last one")


@dataclass(frozen=True)
class EvalConfig:
    """Say how often the jobs are scored on data.eval while they train; always at the end."""

    every_epochs: float | None = _f(
        None, "score after this share of an epoch, again and again", low=0.0, open_low=True
    )
    every_steps: int | None = _f(None, "score after this many optimizer steps, again and again", low=1)


@dataclass(frozen=True)
class EarlyStop:
    """Say when a job that will not win is stopped."""

    method: Literal["none", "median", "asha"] = _f("none", "the rule")


@dataclass(frozen=True)
class Precision:
    """Say how the frozen base is held; adapters and optimizer are always float32."""

    base: Literal["auto", "fp32", "bf16", "int8", "nf4", "fp8"] = _f(
        "auto", "auto is fp32 on a CPU and bf16 on a GPU"
    )


@dataclass(frozen=True)
class Export:
    """Say what the exported adapters carry."""

    base_model: str = _f("", "hub name written into adapter_config.json; empty: the model as given")


@dataclass(frozen=True)
class Sweep:
    """Hold one checked SWEEP.yaml."""

    model: str = _need("hub id, local directory, or .gguf file")
    data: DataConfig = _need("what to train on and to choose by")
    search: SearchConfig = SearchConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    early_stop: EarlyStop = EarlyStop()
    precision: Precision = Precision()
    export: Export = Export()
    devices: str = _f("auto", "auto, cpu, or a count and kind such as 8xA100-40GB")
    base_dir: Path = _f(Path("."), "directory that relative paths start from; without it, that of the file")

    def path(self, name: str) -> Path:
        """Return a path of the file (data.train, init_adapter …) from where the process stands."""
        return self.base_dir / Path(name).expanduser()


SECTIONS = {
    "data": DataConfig,
    "eval": EvalConfig,
    "early_stop": EarlyStop,
    "precision": Precision,
    "export": Export,
}
TOP = ["model", "data", "search", "train", "eval", "early_stop", "precision", "export", "devices", "base_dir"]
RATIO = "alpha_ratio"
RATIO_META = {"doc": "alpha = alpha_ratio × rank", "low": 0.0, "open_low": True}
# Pairs of which one overrules the other: giving both is a contradiction, not a preference.
EXCLUDES = [("alpha", RATIO), ("max_steps", "epochs"), ("warmup_steps", "warmup_ratio"), ("seed", "seeds")]
EXCLUDES += [
    ("init_adapter", name) for name in ("rank", "alpha", RATIO, "use_rslora", "rank_pattern", "alpha_pattern")
]
ONLY_WITH = {"momentum": "sgd", "beta1": "adamw", "beta2": "adamw", "eps": "adamw"}
SEARCHABLE = [name for name in JOB_FIELDS if name != "seed"] + [RATIO]  # search.seed is the sampler's
_SEARCH = ["sample", "seed", "jobs"]
_ELSEWHERE = (
    {f.name: name for name, kind in reversed(SECTIONS.items()) for f in fields(kind)}
    | {name: "search or train" for name in [*JOB_FIELDS, RATIO] if name not in ("train", "seed")}
    | {"sample": "search", "jobs": "search", "seeds": "train", "seed": "train or search", "keep": "train"}
)


def load_sweep(path: str | Path) -> Sweep:
    """Read and check a SWEEP.yaml as a whole, before anything else is loaded.

    Raises:
      UserError: names every fault at once, each by field, line, value and what is allowed.
    """
    path = Path(path)
    raw, faults = read_yaml(path)
    return _sweep(raw, faults, path.parent)


def parse_sweep(text: str, base_dir: Path = Path("."), source: str = "sweep") -> Sweep:
    """Check the text of a SWEEP.yaml as `load_sweep` does."""
    raw, faults = parse_yaml(text, source)
    return _sweep(raw, faults, base_dir)


def job_field(name: str, value: Any) -> Any:
    """Return a value of a job field (or alpha_ratio) in its own type, or raise ValueError saying what is allowed."""
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
    return (
        allowed(float, RATIO_META)
        if name == RATIO
        else allowed(JOB_FIELDS[name].type, JOB_FIELDS[name].metadata)
    )


def _sweep(raw: dict[str, Any], faults: Faults, base_dir: Path) -> Sweep:
    for key in raw:
        if key not in TOP and key != "jobs":
            faults.add((key,), unknown(key, TOP, _ELSEWHERE))
    if isinstance(raw.get("precision"), str):
        raw = raw | {"precision": {"base": raw["precision"]}}
    parts = {}
    for name, kind in SECTIONS.items():
        known = {f.name: f for f in fields(kind)}
        if name == "data" and raw.get("data") is None:
            faults.add(
                ("data",), "is missing; expected a mapping such as {train: train.jsonl, eval: dev.jsonl}"
            )
            continue
        parts[name] = section(raw.get(name), (name,), known, faults, _ELSEWHERE)
    top = {}
    for f in (spec for spec in fields(Sweep) if spec.name in ("model", "devices")):
        value = raw.get(f.name, "" if f.name == "model" else "auto")
        if f.name == "devices" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            faults.add(
                (f.name,),
                f"{'is missing' if value == '' else shown(value) + ' is not allowed'}; expected {f.metadata['doc']}",
            )
        top[f.name] = value
    if "base_dir" in raw:
        if isinstance(raw["base_dir"], str) and raw["base_dir"]:
            base_dir = base_dir / raw["base_dir"]
        else:
            faults.add(("base_dir",), f"{shown(raw['base_dir'])} is not a directory's name")
    _check_data(parts.get("data", {}), faults)
    if len(parts["eval"]) == 2:
        faults.add(("eval",), "every_epochs and every_steps are both given; keep one of them")
    train = _train(raw.get("train"), faults)
    search = _search(raw, train, faults)
    faults.check()
    return Sweep(
        data=DataConfig(**parts["data"]),
        search=search,
        train=train,
        eval=EvalConfig(**parts["eval"]),
        early_stop=EarlyStop(**parts["early_stop"]),
        precision=Precision(**parts["precision"]),
        export=Export(**parts["export"]),
        base_dir=base_dir.absolute(),
        **top,
    )


def _check_data(data: dict[str, Any], faults: Faults) -> None:
    for name in ("train", "eval", "test"):
        if name in data and not data[name].strip():
            faults.add(("data", name), "is empty; expected a file or a data set name")
    given = [data[name] for name in ("train", "eval", "test") if data.get(name)]
    if len(set(given)) < len(given):
        faults.add(
            ("data",), "train, eval and test must be different rows, and two of them name the same file"
        )
    metric = data.get("metric", "loss")
    if metric not in METRICS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", metric):
        faults.add(
            ("data", "metric"),
            f"{shown(metric)} is not known; expected one of {', '.join(METRICS)}, or module:function",
        )
    choices = data.get("choices", ())
    if choices and metric != "choice_accuracy":
        faults.add(
            ("data", "choices"),
            f"has no effect with the metric {metric}; use metric: choice_accuracy or leave it out",
        )
    if choices and (
        len(set(choices)) < 2 or len(set(choices)) < len(choices) or not all(c.strip() for c in choices)
    ):
        faults.add(
            ("data", "choices"), f"{shown(list(choices))} must be two or more different, non-empty texts"
        )
    buckets, longest = data.get("buckets", ()), data.get("max_length", 1024)
    if buckets and (list(buckets) != sorted(set(buckets)) or buckets[-1] != longest or len(buckets) > 16):
        faults.add(
            ("data", "buckets"),
            f"{shown(list(buckets))} must rise, end at max_length ({longest}) and be at most 16",
        )


def _check_pairs(where: Path_, given: set[str], faults: Faults) -> None:
    for one, other in EXCLUDES:
        if one in given and other in given:
            faults.add((*where, one), f"contradicts {other}; keep one of them")


def _job_fields(raw: dict[str, Any], where: Path_, faults: Faults, extra: list[str]) -> dict[str, Any]:
    """Check single values of job fields; keys in `extra` are the caller's."""
    out = {}
    for key, value in raw.items():
        if key in extra:
            continue
        if key not in JOB_FIELDS and key != RATIO:
            faults.add((*where, key), unknown(key, [*JOB_FIELDS, RATIO, *extra], _ELSEWHERE))
            continue
        try:
            out[key] = job_field(key, value)
        except ValueError as error:
            hint = "; to try several values, list them under search" if isinstance(value, list) else ""
            faults.add((*where, key), f"{error}{hint}")
    return out


def _train(raw: Any, faults: Faults) -> TrainConfig:
    if raw is not None and not isinstance(raw, dict):
        faults.add(
            ("train",),
            f"{shown(raw)} is not a mapping; known keys: {', '.join([*JOB_FIELDS, RATIO, 'seeds', 'keep'])}",
        )
    if not isinstance(raw, dict):
        return TrainConfig()
    raw = dict(raw)
    if raw.pop("train", None) is not None:
        faults.add(("train", "train"), "the training rows of the sweep belong under data.train")
    fixed = _job_fields(raw, ("train",), faults, ["seeds", "keep"])
    own = {f.name: f for f in fields(TrainConfig) if f.metadata}
    rest = section({k: v for k, v in raw.items() if k in own}, ("train",), own, faults, {})
    if "seeds" in rest and (not rest["seeds"] or len(set(rest["seeds"])) < len(rest["seeds"])):
        faults.add(("train", "seeds"), f"{shown(list(rest['seeds']))} must be different seeds, at least one")
    _check_pairs(("train",), set(raw), faults)
    return TrainConfig(tuple(fixed.items()), **rest)


def _axis(name: str, raw: Any, where: Path_, faults: Faults) -> Axis:
    """Read one axis: a list of values, one value, or a range."""
    mapping_field = name in ("rank_pattern", "alpha_pattern")
    if isinstance(raw, dict) and not mapping_field:
        kind, ends = next(iter(raw.items()), ("", None))
        if len(raw) != 1 or kind not in ("uniform", "log_uniform"):
            faults.add(
                where,
                f"{shown(raw)} is not a range; expected {{uniform: [low, high]}} or {{log_uniform: [low, high]}}",
            )
            return ()
        number = name == RATIO or JOB_FIELDS[name].type in (int, float, int | None)
        if not number:
            faults.add(
                where, f"a range needs a numeric field; list the values of {name}: {describe_field(name)}"
            )
            return ()
        if not isinstance(ends, list) or len(ends) != 2:
            faults.add((*where, kind), f"{shown(ends)} is not a range; expected [low, high]")
            return ()
        try:
            low, high = (job_field(name, end) for end in ends)
        except ValueError as error:
            faults.add((*where, kind), str(error))
            return ()
        if not low < high or (kind == "log_uniform" and low <= 0):
            faults.add(
                (*where, kind),
                f"{shown(ends)} must rise{' and start above 0' if kind == 'log_uniform' else ''}",
            )
        return Range(kind, low, high)
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


def _search(raw: dict[str, Any], train: TrainConfig, faults: Faults) -> SearchConfig:
    found = raw.get("search")
    if found is not None and not isinstance(found, dict):
        faults.add(
            ("search",),
            f"{shown(found)} is not a mapping; expected axes such as {{rank: [8, 16]}}, or jobs: [...]",
        )
    found = dict(found) if isinstance(found, dict) else {}
    where: Path_ = ("search", "jobs")
    if "jobs" in raw:
        if "jobs" in found:
            faults.add(("jobs",), "is given at the top and under search; keep one of them")
        found["jobs"], where = raw["jobs"], ("jobs",)
    own = {f.name: f for f in fields(SearchConfig) if f.metadata}
    rest = section({k: v for k, v in found.items() if k in own}, ("search",), own, faults, {})
    axes: list[tuple[str, Axis]] = []
    for key, value in found.items():
        if key in SEARCHABLE:
            axes.append((key, _axis(key, value, ("search", key), faults)))
        elif key not in _SEARCH:
            faults.add(("search", key), unknown(key, SEARCHABLE + _SEARCH, _ELSEWHERE))
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
        if axes or "sample" in found:
            faults.add(
                where,
                f"a literal list excludes {', '.join([n for n, _ in axes] + ['sample'] * ('sample' in found))}",
            )
        jobs = _literal(found["jobs"], where, faults)
    elif "sample" not in found:
        for name, axis in axes:
            if isinstance(axis, Range):
                faults.add(("search", name), "a range needs `sample: N`; or list the values")
    _check_unused(fixed, axes, jobs, faults)
    return SearchConfig(tuple(axes), jobs=jobs, **rest)


def _literal(raw: Any, where: Path_, faults: Faults) -> tuple[tuple[tuple[str, Any], ...], ...]:
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
        out.append(tuple(_job_fields(item, (*where, i), faults, []).items()))
        _check_pairs((*where, i), set(item), faults)
    return tuple(out)


def _optimizers(fixed: dict[str, Any], axes: Any, jobs: Any) -> set[str]:
    kinds = {fixed.get("optimizer", JOB_FIELDS["optimizer"].default)}
    kinds |= {value for job in jobs or () for name, value in job if name == "optimizer"}
    return set(dict(axes).get("optimizer", kinds))


def _check_unused(fixed: dict[str, Any], axes: list[tuple[str, Axis]], jobs: Any, faults: Faults) -> None:
    """Refuse an optimizer's setting that no job of the sweep would read."""
    kinds = _optimizers(fixed, axes, jobs)
    for name, optimizer in ONLY_WITH.items():
        if optimizer not in kinds:
            for where, given in (("train", fixed), ("search", dict(axes))):
                if name in given:
                    faults.add((where, name), f"has no effect without optimizer: {optimizer}")


def unsupported(sweep: Sweep) -> list[str]:
    """Name what the sweep asks for and this version plans but does not run, one sentence each."""
    out = []
    if sweep.precision.base in ("int8", "nf4", "fp8"):
        out.append(
            f"precision.base: {sweep.precision.base} can be planned but not trained yet; use auto, fp32 or bf16"
        )
    if sweep.data.metric not in ("loss", "choice_accuracy"):
        out.append(
            f"data.metric: {sweep.data.metric} is not scored by a sweep yet; use loss or choice_accuracy"
        )
    if sweep.early_stop.method != "none":
        out.append(f"early_stop.method: {sweep.early_stop.method} can be planned but not run yet; use none")
    return out


def resolved(sweep: Sweep) -> str:
    """Write a sweep as YAML text with every value in force; reading it gives the same jobs and settings."""
    axes, jobs, fixed = sweep.search.axes, sweep.search.jobs, dict(sweep.train.fixed)
    given = {name for name, _ in axes} | {name for job in jobs or () for name, _ in job} | set(fixed)
    hidden = (
        given
        | {one for one, other in EXCLUDES if other in given}
        | {other for one, other in EXCLUDES if one in given}
    )
    hidden |= {name for name, kind in ONLY_WITH.items() if kind not in _optimizers(fixed, axes, jobs)}
    hidden |= {"seed"} if sweep.train.seeds else set()
    train = {
        n: fixed.get(n, spec.default) for n, spec in JOB_FIELDS.items() if n in fixed or n not in hidden
    } | fixed
    train |= {"seeds": sweep.train.seeds, "keep": sweep.train.keep}
    search: dict[str, Any] = {
        n: {a.kind: [a.low, a.high]} if isinstance(a, Range) else list(a) for n, a in axes
    }
    search |= {"jobs": [dict(job) for job in jobs] if jobs is not None else None}
    search |= {"sample": sweep.search.sample, "seed": sweep.search.seed}
    sections = {name: vars(getattr(sweep, name)) for name in SECTIONS}
    values = sections | {"model": sweep.model, "search": search, "train": train, "devices": sweep.devices}
    values |= {"base_dir": str(sweep.base_dir)}
    return dump_yaml({name: _plain(values[name]) for name in TOP if _plain(values[name]) != {}})


def _plain(value: Any) -> Any:
    """Return YAML values: tuples as lists, patterns as mappings, and nothing for what is not set."""
    if isinstance(value, dict):
        plain = {k: _pattern(v) if k.endswith("_pattern") else _plain(v) for k, v in value.items()}
        return {k: v for k, v in plain.items() if v not in (None, "", [], {})}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _pattern(value: Any) -> Any:
    return [dict(v) for v in value] if isinstance(value, list) else dict(value)
