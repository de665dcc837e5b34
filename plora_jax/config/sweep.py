"""A sweep as the user wrote it: SWEEP.yaml read, checked as a whole, and written back in full."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from plora_jax.config.schema import section, unknown
from plora_jax.config.space import (
    BELONGS,
    EXCLUDES,
    ONLY_WITH,
    PATTERNS,
    Range,
    SearchConfig,
    TrainConfig,
    optimizers,
    read_search,
    read_train,
    setting,
)
from plora_jax.config.yamlfile import Faults, Place, dump_yaml, parse_yaml, read_yaml, shown
from plora_jax.data.formats import Format
from plora_jax.evaluation.answers import ALLOWED, make_answer
from plora_jax.evaluation.metrics import BUILT_IN, USERS
from plora_jax.jobs import JOB_FIELDS
from plora_jax.search.early_stop import READ_BY, EarlyStop, EvalConfig, check_early_stop

METRICS = tuple(BUILT_IN)


@dataclass(frozen=True)
class DataConfig:
    """Name the rows to train on, to choose by and to report on, and how they are read."""

    train: str = field(metadata={"doc": "training rows: a file, or a Hugging Face data set name"})
    eval: str = setting("", "held-out rows that the best job is chosen by")
    test: str = setting("", "other held-out rows; the base model and the best job are scored on them once")
    max_length: int = setting(1024, "longest row in tokens", low=8, high=1_048_576)
    metric: str = setting(
        "loss", "what ranks the jobs", allowed=f"one of {', '.join(METRICS)}, or module:function"
    )
    choices: tuple[str, ...] = setting(
        (), "the answers of choice_accuracy, where a row does not list its own"
    )
    answer: str | tuple[tuple[str, str], ...] = setting(
        "whole",
        "where exact_match finds the answer in a text: all of it, its last number, the first line after a mark, or "
        "what a regular expression matches",
        allowed=ALLOWED,
    )
    max_new_tokens: int = setting(
        64, "longest generated answer in tokens, of exact_match and module:function", low=1, high=65_536
    )
    format: Literal["auto", Format] = setting("auto", "how a row is read")
    on_long: Literal["truncate", "drop", "error"] = setting(
        "truncate", "what happens to a row longer than max_length"
    )
    on_bad_row: Literal["error", "skip"] = setting("error", "what happens to a row that cannot be read")
    buckets: tuple[int, ...] = setting(
        (), "row lengths to compile for, the last one max_length; none: chosen", low=8
    )
    packing: bool = setting(
        False,
        "lay the examples of a micro-step end to end in one sequence, instead of padding each to the longest",
    )
    rows: int | None = setting(
        None, "training rows that `plora plan` counts while the file is not there", low=1
    )


@dataclass(frozen=True)
class Precision:
    """Say how the frozen base is held; adapters and their optimizer steps are always float32."""

    base: Literal["auto", "fp32", "bf16", "int8", "nf4", "fp8"] = setting(
        "auto",
        "auto is fp32 on a CPU and bf16 on a GPU; fp8 rounds the layers' weights to 8-bit floats (L40S, RTX 4090, H100 "
        "or newer; on a CPU slowly)",
    )


@dataclass(frozen=True)
class Export:
    """Say what the exported adapters carry."""

    base_model: str = setting(
        "",
        "hub name written into adapter_config.json, also of a .gguf, whose rounded weights were trained on; "
        "empty: the model as given",
    )


@dataclass(frozen=True)
class LogConfig:
    """Say where the jobs' losses and scores are sent, beside the run's own files."""

    to: tuple[Literal["tensorboard", "wandb"], ...] = setting(
        (), "trackers; each needs its extra of plora-jax"
    )
    project: str = setting("", "project of Weights & Biases; empty: plora")


@dataclass(frozen=True)
class Sweep:
    """Hold one checked SWEEP.yaml."""

    model: str = field(metadata={"doc": "hub id, local directory, or .gguf file"})
    data: DataConfig
    search: SearchConfig = field(default=SearchConfig())
    train: TrainConfig = field(default=TrainConfig())
    eval: EvalConfig = field(default=EvalConfig())
    early_stop: EarlyStop = field(default=EarlyStop())
    precision: Precision = Precision()
    export: Export = Export()
    log: LogConfig = LogConfig()
    devices: str = setting(
        "auto",
        "auto, cpu, or a count and kind such as 8xA100-40GB; several kinds with +, as in 4xA100-40GB+4xH200",
    )
    base_dir: Path = field(default=Path("."))  # where relative paths start; without it, the file's directory

    def path(self, name: str) -> Path:
        """Return a path of the file (data.train, init_adapter …) from where the process stands."""
        return self.base_dir / Path(name).expanduser()


SECTIONS = {
    "data": DataConfig,
    "eval": EvalConfig,
    "early_stop": EarlyStop,
    "precision": Precision,
    "export": Export,
    "log": LogConfig,
}
TOP = ["model", "data", "search", "train", *list(SECTIONS)[1:], "devices", "base_dir"]
SECTION_OF = {f.name: name for name, kind in reversed(SECTIONS.items()) for f in fields(kind)} | BELONGS


def load_sweep(path: str | Path) -> Sweep:
    """Read and check a SWEEP.yaml as a whole, before anything else is loaded.

    Raises:
      UserError: names every fault at once, each by field, line, value and what is allowed.
    """
    path = Path(path)
    raw, faults = read_yaml(path)
    return _sweep(raw, faults, path.parent)


def load_added(path: Path, run: Path) -> Sweep:
    """Read a file of jobs to add to a run (`search`, `train` or `jobs`); all else is as in the run's sweep.yaml.

    Raises:
      UserError: names every fault at once; a section that the run fixes is one.
    """
    raw, faults = read_yaml(path)
    whole, _ = read_yaml(run)
    for key in raw:
        if key not in ("search", "train", "jobs"):
            faults.add((key,), "is the run's; a file of added jobs has search, train or jobs")
    search: dict[str, Any] = raw["search"] if isinstance(raw.get("search"), dict) else {}
    listed = raw.get("jobs") or search.get("jobs") or ()
    given = {*search, *(name for job in listed if isinstance(job, dict) for name in job)}
    given |= {name for pair in EXCLUDES for name in pair if given & set(pair)}
    train = {name: value for name, value in (whole.get("train") or {}).items() if name not in given}
    kept = {name: value for name, value in whole.items() if name not in ("search", "jobs", "train")}
    return _sweep(kept | {"train": train} | raw, faults, run.parent)


def parse_sweep(text: str, base_dir: Path = Path("."), source: str = "sweep") -> Sweep:
    """Check the text of a SWEEP.yaml as `load_sweep` does."""
    raw, faults = parse_yaml(text, source)
    return _sweep(raw, faults, base_dir)


def make_sweep(**sections: Any) -> Sweep:
    """Check a sweep given in Python by the file's own sections: `make_sweep(model="m", data={"train": "a.jsonl"})`."""
    return _sweep(sections, Faults("sweep"), Path("."))


def _sweep(raw: dict[str, Any], faults: Faults, base_dir: Path) -> Sweep:
    for key in raw:
        if key not in TOP and key != "jobs":
            faults.add((key,), unknown(key, TOP, SECTION_OF))
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
        parts[name] = section(raw.get(name), (name,), known, faults, SECTION_OF)
    top = {}
    for f in (spec for spec in fields(Sweep) if spec.name in ("model", "devices")):
        value = raw.get(f.name, "" if f.name == "model" else "auto")
        if f.name == "devices" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            faults.add(
                (f.name,),
                f"{'is missing' if value == '' else shown(value)}; expected {f.metadata['doc']}",
            )
        top[f.name] = value
    if "base_dir" in raw:
        if isinstance(raw["base_dir"], str) and raw["base_dir"]:
            _check_path(("base_dir",), raw["base_dir"], base_dir, faults)
            base_dir = base_dir / raw["base_dir"]
        else:
            faults.add(("base_dir",), f"{shown(raw['base_dir'])} is not a directory's name")
    _check_data(parts.get("data", {}), base_dir, faults)
    _check_path(("model",), top["model"], base_dir, faults)
    if None not in (parts["eval"].get("every_epochs"), parts["eval"].get("every_steps")):
        faults.add(("eval",), "every_epochs and every_steps are both given; keep one of them")
    check_early_stop(parts["early_stop"], faults)
    log = parts["log"]
    if log.get("project") and "wandb" not in log.get("to", ()):
        faults.add(("log", "project"), "has no effect without wandb in log.to; add it or leave project out")
    train = read_train(raw.get("train"), faults, SECTION_OF)
    search = read_search(raw, train, faults, SECTION_OF)
    faults.check()
    local = base_dir / Path(top["model"]).expanduser()  # found from the sweep's own directory, as data is
    top["model"] = str(local.absolute()) if local.exists() else top["model"]
    return Sweep(
        data=DataConfig(**parts["data"]),
        search=search,
        train=train,
        eval=EvalConfig(**parts["eval"]),
        early_stop=EarlyStop(**parts["early_stop"]),
        precision=Precision(**parts["precision"]),
        export=Export(**parts["export"]),
        log=LogConfig(**parts["log"]),
        base_dir=base_dir.absolute(),
        **top,
    )


def _check_path(where: Place, name: Any, base_dir: Path, faults: Faults) -> None:
    """Refuse a name that no file can have: a NUL in it, too long, an unknown ~user."""
    try:
        (base_dir / Path(str(name)).expanduser()).exists()
    except (OSError, ValueError, RuntimeError) as error:
        faults.add(
            where, f"{shown(name)} cannot be a file's name ({getattr(error, 'strerror', None) or error})"
        )


def _file(base_dir: Path, name: str) -> Path:
    """Return the one path of a file however it is written; a data set's name stays different from any other."""
    try:
        return (base_dir / Path(name).expanduser()).resolve()
    except (OSError, ValueError, RuntimeError):  # told by _check_path
        return Path(name)


def _check_data(data: dict[str, Any], base_dir: Path, faults: Faults) -> None:
    for name in ("train", "eval", "test"):
        if name in data and not data[name].strip():
            faults.add(("data", name), "is empty; expected a file or a data set name")
        elif name in data:
            _check_path(("data", name), data[name], base_dir, faults)
    given = [_file(base_dir, data[name]) for name in ("train", "eval", "test") if data.get(name)]
    if len(set(given)) < len(given):
        faults.add(
            ("data",), "train, eval and test must be different rows, and two of them name the same file"
        )
    metric = data.get("metric", "loss")
    if metric not in METRICS and not USERS.fullmatch(metric):
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
    answer, longest = data.get("answer", "whole"), data.get("max_new_tokens")
    if answer != "whole" and metric != "exact_match":
        faults.add(
            ("data", "answer"), f"has no effect with the metric {metric}; use exact_match or leave it out"
        )
    if longest not in (None, DataConfig.max_new_tokens) and metric in ("loss", "choice_accuracy"):
        faults.add(
            ("data", "max_new_tokens"), f"has no effect with the metric {metric}, which generates nothing"
        )
    try:
        make_answer(answer)
    except ValueError as error:
        faults.add(("data", "answer"), str(error))
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
    if buckets and data.get("packing"):
        faults.add(
            ("data", "packing"), "contradicts buckets: packed sequences have lengths of their own; keep one"
        )


def unsupported(sweep: Sweep) -> list[str]:
    """Name what the sweep asks for and this version plans but does not run, one sentence each."""
    out = []
    if sweep.precision.base in ("int8", "nf4"):
        base = sweep.precision.base
        out.append(f"precision.base: {base} can be planned but not trained yet; use auto, fp32, bf16 or fp8")
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
    hidden |= {n for n, readers in ONLY_WITH.items() if optimizers(fixed, axes, jobs).isdisjoint(readers)}
    hidden |= {"seed"} if sweep.train.seeds else set()
    train = {
        n: fixed.get(n, spec.default) for n, spec in JOB_FIELDS.items() if n in fixed or n not in hidden
    } | fixed
    train |= {name: getattr(sweep.train, name) for name in ("seeds", "keep", "slots")}
    search: dict[str, Any] = {
        n: {a.kind: [a.low, a.high]} if isinstance(a, Range) else list(a) for n, a in axes
    }
    search |= {"jobs": [dict(job) for job in jobs] if jobs is not None else None}
    search |= {n: getattr(sweep.search, n) for n in ("method", "sample", "seed")}
    search |= {"sampler": sweep.search.sampler if sweep.search.strategy == "optuna" else None}
    search |= {"budget": vars(sweep.search.budget)}
    sections = {name: vars(getattr(sweep, name)) for name in SECTIONS}
    stop = sections["early_stop"]
    sections["early_stop"] = {n: stop[n] for n in ("method", *READ_BY[stop["method"]])}
    values = sections | {"model": sweep.model, "search": search, "train": train, "devices": sweep.devices}
    values |= {"base_dir": str(sweep.base_dir)}
    return dump_yaml({name: _plain(values[name]) for name in TOP if _plain(values[name]) != {}})


def _plain(value: Any) -> Any:
    """Return YAML values: tuples as lists, patterns as mappings, and nothing for what is not set."""
    if isinstance(value, dict):
        mapped = (*PATTERNS, "answer")
        plain = {
            k: _pattern(v) if k in mapped and not isinstance(v, str) else _plain(v) for k, v in value.items()
        }
        return {k: v for k, v in plain.items() if v not in (None, "", [], {})}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _pattern(value: Any) -> Any:
    return [dict(v) for v in value] if isinstance(value, list) else dict(value)
