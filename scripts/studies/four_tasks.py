"""Measure what a sweep of the paper's search space is worth on the paper's four tasks, and the time that it replaces.

usage: python -m scripts.studies.four_tasks --model GGUF --tasks DIR --work DIR --out FILE.json
           [--configurations N] [--slots N] [--train-rows N] [--eval-rows N] [--test-rows N] [--only TASK …]
           [--parts sweep|seeds|alone …] [--seconds S]

DIR holds {wnli,cola}_{train,dev}.jsonl and {mrpc,gsm8k}_{train,test}.jsonl. For each task configurations are drawn
from the paper's space and trained in one sweep, together with one job at the defaults of PEFT and of transformers'
Trainer; the best is chosen on rows cut from the training file and scored, beside the base model and the defaults, on
the rows of the other file. GSM8K is chosen by its loss, since a model of this size answers so few problems that their
number on some hundred rows is noise, and scored by its answers. Then winner and defaults are trained with more seeds.

Sequential time: the optimizer steps of all jobs, each at the median step of one job alone (`alone`), of batch size 1
and rank 8. It leaves out compilation, scores and exports, and no step of these jobs is shorter, so that it is a lower
estimate.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from plora_jax.config.sweep import make_sweep
from plora_jax.data.encode import read_examples
from plora_jax.engine.rundir import write_atomic
from plora_jax.evaluation.scorer import EvalSet, Score, Scorer, read_eval_set, runtime_for
from plora_jax.jobs import Job
from plora_jax.peft import import_adapter
from plora_jax.search.configurations import search_jobs
from scripts.studies.common import Finished, Study, finish, parser, table

SPACE = {  # scripts/sweeps/paper.yaml
    "learning_rate": {"log_uniform": [2e-5, 4e-4]},
    "rank": [8, 16, 32, 64, 128],
    "alpha_ratio": [0.25, 0.5, 1, 2, 4],
    "batch_size": [1, 2, 4, 8, 16, 32],
}
TRAIN = {"epochs": 1, "scheduler": "cosine", "warmup_ratio": 0.03}
# peft.LoraConfig() and transformers.TrainingArguments(), but for the epochs, which are the sweep's
DEFAULT = {
    "learning_rate": 5e-5,
    "rank": 8,
    "alpha": 8,
    "batch_size": 8,
    "scheduler": "linear",
    "warmup_ratio": 0.0,
}
PARTS = ("sweep", "alone", "seeds")  # of all tasks what matters most, then the rest
MORE_SEEDS = [1, 2]
ALONE_STEPS = 64
SPLIT_SEED = 0
GPU_TOKENS = 1 << 18  # scored at a time on a GPU; a model this small leaves room


@dataclass(frozen=True)
class Task:
    """Name a task's files, the answers of its rows, and what a sweep is ranked by; no choices: it is generated."""

    name: str
    train: str
    test: str
    choices: tuple[str, ...] = ()
    max_length: int = 160

    @property
    def ranked(self) -> dict[str, Any]:
        """Return the fields of `data` that say what the sweep's jobs are ranked by."""
        if not self.choices:
            return {"metric": "loss"}
        return {"metric": "choice_accuracy", "choices": list(self.choices)}

    def reported(self, new_tokens: int) -> dict[str, Any]:
        """Return the fields of `data` for the scores on test rows."""
        if self.choices:
            return self.ranked
        return {"metric": "exact_match", "answer": {"after": "####"}, "max_new_tokens": new_tokens}


YES_NO = (" no", " yes")
TASKS = (  # cheap ones first
    Task("wnli", "wnli_train.jsonl", "wnli_dev.jsonl", YES_NO),
    Task("cola", "cola_train.jsonl", "cola_dev.jsonl", YES_NO),
    Task("mrpc", "mrpc_train.jsonl", "mrpc_test.jsonl", YES_NO),
    Task("gsm8k", "gsm8k_train.jsonl", "gsm8k_test.jsonl", max_length=448),
)


def split(task: Task, folder: Path, into: Path, counts: Mapping[str, int]) -> dict[str, str]:
    """Write train and eval rows, drawn from one file without an overlap, and test rows from the other.

    A file too small for train and eval rows gives a fifth of it to eval; test rows are all where there are fewer.
    """
    random = np.random.Generator(np.random.Philox(SPLIT_SEED))
    pools = {}
    for name in (task.train, task.test):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        pools[name] = [lines[i] for i in random.permutation(len(lines))]
    pool = pools[task.train]
    whole = counts["train"] + counts["eval"] <= len(pool)
    held_out = min(counts["eval"], len(pool) if whole else len(pool) // 5)
    parts = {"eval": pool[:held_out], "train": pool[held_out : held_out + counts["train"]]}
    parts["test"] = pools[task.test][: counts["test"]]
    into.mkdir(parents=True, exist_ok=True)
    for part, lines in parts.items():
        write_atomic(into / f"{part}.jsonl", "".join(line + "\n" for line in lines))
    return {part: str((into / f"{part}.jsonl").absolute()) for part in parts}


def drawn(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw configurations from the paper's space, as entries of `search.jobs`."""
    space = make_sweep(model="-", data={"train": "-"}, search={**SPACE, "sample": count, "seed": seed})
    fields = ("learning_rate", "rank", "alpha", "batch_size")
    return [{name: getattr(job, name) for name in fields} for job in search_jobs(space)]


def sections(task: Task, data: Mapping[str, str], jobs: list[dict[str, Any]], **train: Any) -> dict[str, Any]:
    """Return a sweep of listed jobs, as a user would write it; test rows are scored by `Tested`."""
    rows = {part: data[part] for part in ("train", "eval")}
    return {
        "data": {**rows, "max_length": task.max_length, **task.ranked},
        "search": {"jobs": jobs},
        "train": TRAIN | train,
    }


def is_default(row: Mapping[str, Any]) -> bool:
    """Tell whether a job of a leaderboard is the one at the libraries' defaults."""
    return all(row[name] == value for name, value in DEFAULT.items())


def listed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a leaderboard's job as an entry of `search.jobs`."""
    return {name: row[name] for name in DEFAULT}


class Tested:
    """Score adapters on the test rows of one task."""

    def __init__(self, study: Study, task: Task, data: Mapping[str, str]) -> None:
        self.base = base = study.base
        sweep = make_sweep(
            model=str(study.args.model),
            data={
                "train": data["train"],
                "max_length": task.max_length,
                **task.reported(study.args.new_tokens),
            },
        )
        read = partial(
            read_examples,
            tokenizer=base.tokenizer,
            max_length=task.max_length,
            vocab_size=base.config.vocab_size,
        )
        test, train = read(data["test"]), read(data["train"])
        self.evals: EvalSet = read_eval_set(sweep.data, test, train, base.tokenizer, sweep.model, Path("."))
        tokens = None if jax.default_backend() == "cpu" else GPU_TOKENS
        self.scorer = Scorer(base, runtime_for(base), tokens)

    def score(self, sweep: Finished, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Return the scores of the base model and of jobs of a sweep."""
        adapters = [import_adapter(sweep.path / row["adapter"], self.base.config)[0] for row in rows]
        jobs = [Job(rank=row["rank"], alpha=row["alpha"]) for row in rows]
        return self.scorer.score([None, *zip(jobs, adapters, strict=True)], self.evals)


class Experiment:
    """Hold one task's rows and what has come of them so far; its parts are run in order."""

    def __init__(self, study: Study, task: Task, out: dict[str, Any]) -> None:
        args = study.args
        counts = {"train": args.train_rows, "eval": args.eval_rows, "test": args.test_rows}
        if not task.choices:
            counts |= {"train": args.gsm8k_train_rows, "test": args.gsm8k_test_rows}
        self.study, self.task, self.out = study, task, out
        self.data = split(task, args.tasks, args.work / task.name, counts)
        rows = {part: len(Path(path).read_text().splitlines()) for part, path in self.data.items()}
        out |= {"rows": rows, "ranked_by": task.ranked["metric"], "metric": task.reported(1)["metric"]}

    def sweep(self) -> None:
        """Train all configurations and the defaults; score base, defaults and winner on the test rows."""
        args = self.study.args
        jobs = [*drawn(args.configurations, args.search_seed), DEFAULT]
        more = {"slots": args.slots} if args.slots else {}
        found = self.study.sweep(f"{self.task.name}/sweep", sections(self.task, self.data, jobs, **more))
        [default] = [row for row in found.jobs if is_default(row)]
        ranked = [row for row in found.jobs if not is_default(row)]
        self.winner = ranked[0]
        packs = json.loads((found.path / "plan.json").read_text())["packs"]
        self.out |= {
            "winner": listed(self.winner) | {"job_id": self.winner["job_id"]},
            "eval": {
                "base": found.board["base"]["score"],
                "default": default["score"],
                "best": self.winner["score"],
            },
            "jobs": len(ranked),
            "failed": sum(row["status"] == "failed" for row in ranked),
            "steps": sum(row["steps"] for row in ranked),
            "tokens": sum(row["tokens"] for row in ranked),
            "packs": [
                {name: pack[name] for name in ("m", "policy")} | {"J": len(pack["slots"])} for pack in packs
            ],
            "programs": found.programs,
            "compile_s": round(found.compile_s, 1),
            "seconds": round(found.seconds, 1),
        }
        self.tested = Tested(self.study, self.task, self.data)
        self.out["test"] = {"base": [], "default": [], "best": []}
        self._test(found, default, self.winner)

    def _test(self, found: Finished, default: Mapping[str, Any], best: Mapping[str, Any]) -> None:
        """Score the defaults and the winner on the test rows, and the base again beside them: one program for all."""
        scores = self.tested.score(found, [default, best])
        for name, score in zip(("base", "default", "best"), scores, strict=True):
            self.out["test"][name].append(vars(score))

    def alone(self) -> None:
        """Time one job by itself, and estimate how long the sweep's jobs would take one after another."""
        job = {"rank": 8, "alpha": 8, "batch_size": 1, "max_steps": ALONE_STEPS}
        whole = sections(self.task, self.data, [job])
        whole["train"] = {name: value for name, value in TRAIN.items() if name != "epochs"}
        found = self.study.sweep(f"{self.task.name}/alone", whole)
        worker = json.loads((found.path / "workers" / "0.json").read_text())
        self.out["alone"] = {"step_ms": worker["step_ms"]}
        if "steps" in self.out:
            seconds = self.out["steps"] * worker["step_ms"] / 1e3
            self.out["alone"] |= {
                "sequential_s": round(seconds, 1),
                "times_sweep": seconds / self.out["seconds"],
            }

    def seeds(self) -> None:
        """Train winner and defaults with more seeds, and score these on the test rows too."""
        jobs = [DEFAULT, listed(self.winner)]
        found = self.study.sweep(
            f"{self.task.name}/seeds", sections(self.task, self.data, jobs, seeds=MORE_SEEDS)
        )
        for seed in MORE_SEEDS:
            default, best = sorted(
                (row for row in found.jobs if row["seed"] == seed), key=is_default, reverse=True
            )
            self._test(found, default, best)


def spread(scores: Sequence[Mapping[str, Any]]) -> str:
    """Write scores as percent: their mean, and with more than one their standard deviation."""
    values = [100 * score["score"] for score in scores]
    more = f" ± {statistics.stdev(values):.1f}" if len(set(values)) > 1 else ""
    return f"{statistics.fmean(values):.1f}{more}"


def as_table(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay the tasks' results out."""
    rows = [
        ["task", "train/eval/test", "base", "default", "best of sweep", "n", "sweep s", "sequential s", "×"]
    ]
    for name, one in tasks.items():
        if "test" in one:
            counts = "/".join(str(one["rows"][part]) for part in ("train", "eval", "test"))
            scores = [spread(one["test"][which]) for which in ("base", "default", "best")]
            alone = one.get("alone")
            times = [f"{alone['sequential_s']:.0f}", f"{alone['times_sweep']:.1f}"] if alone else ["", ""]
            rows.append([name, counts, *scores, str(one["jobs"]), f"{one['seconds']:.0f}", *times])
    return table(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and return the exit code."""
    options = parser(__doc__)
    options.add_argument(
        "--tasks", type=Path, required=True, metavar="DIR", help="where the tasks' files are"
    )
    options.add_argument("--only", nargs="+", choices=[task.name for task in TASKS], metavar="TASK")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    options.add_argument("--slots", type=int, metavar="N", help="most jobs of a pack (default: as planned)")
    for flag, default in (
        ("configurations", 120),
        ("search-seed", 0),
        ("train-rows", 512),
        ("eval-rows", 256),
        ("test-rows", 1000),
        ("gsm8k-train-rows", 512),
        ("gsm8k-test-rows", 512),
        ("new-tokens", 256),
    ):
        options.add_argument(
            f"--{flag}", type=int, default=default, metavar="N", help=f"(default: {default})"
        )
    args = options.parse_args(argv)
    study = Study(args)
    tasks: dict[str, dict[str, Any]] = {}
    study.result["tasks"] = tasks
    experiments = []
    for task in TASKS:
        if args.only is None or task.name in args.only:
            tasks[task.name] = {}
            experiments.append(Experiment(study, task, tasks[task.name]))
    for what in (part for part in PARTS if part in args.parts):
        for experiment in experiments:
            study.part(f"{experiment.task.name}, {what}", getattr(experiment, what))
    return finish(study, as_table(tasks))


if __name__ == "__main__":
    sys.exit(main())
