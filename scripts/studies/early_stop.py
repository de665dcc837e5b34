"""Measure what early stopping with refilled slots finds, and at what cost, against the full sweep of the same jobs.

usage: python -m scripts.studies.early_stop --model GGUF --work DIR --out FILE.json [--seeds 0 1 2] [--seconds S]

The task is the quickstart's (rated movie-review snippets), with more rows. For each seed a number of configurations
is drawn at random and trained twice: whole, in as many slots as are fastest, and with `early_stop: asha` in fewer
slots than there are jobs. The full sweep is scored nine times (`--scorings`), so that `scripts/early_stop_sim.py` can
replay it; what a few rules would have come to is in the result.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from plora_jax.quickstart import LABELS, MAX_TOKENS, make_task
from plora_jax.search.early_stop import EarlyStop, expected_fraction
from scripts.early_stop_sim import RULES, compare
from scripts.studies.common import Finished, Study, finish, parser, table

SPACE = {
    "learning_rate": {"log_uniform": [1e-5, 1e-2]},  # from hardly any training to divergence
    "rank": [4, 8, 16],
    "batch_size": [4, 8, 16],
    "alpha_ratio": [0.5, 1, 2, 4],
}
ETA = 3  # rungs at 1/9 and 1/3


def sections(data: dict[str, str], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the full sweep of a seed, as a user would write it."""
    return {
        "data": {
            **data,
            "max_length": MAX_TOKENS + 1,
            "buckets": [MAX_TOKENS + 1],
            "metric": "choice_accuracy",
            "choices": list(LABELS),
        },
        "search": {**SPACE, "sample": args.configurations, "seed": seed},
        "train": {
            "epochs": args.epochs,
            "scheduler": "cosine",
            "warmup_ratio": 0.1,
            "seed": seed,
            "data_seed": seed,
            "keep": "last",
        },
        "eval": {"every_epochs": args.epochs / args.scorings},
    }


def stopped(full: dict[str, Any], slots: int) -> dict[str, Any]:
    """Return the same sweep with early stopping in so many slots; it is scored at its rungs alone."""
    kept = {name: section for name, section in full.items() if name != "eval"}
    early = {"method": "asha", "reduction_factor": ETA, "grace_period": ETA**-2}
    return kept | {"train": {**full["train"], "slots": slots}, "early_stop": early}


def summary(sweep: Finished) -> dict[str, Any]:
    """Return what one sweep came to."""
    best, placed = sweep.jobs[0], sweep.events("placed")
    fields = ("learning_rate", "rank", "alpha", "batch_size", "status")
    test = sweep.board["test"]
    return {
        "best": best["job_id"],
        "best_job": {name: best[name] for name in fields},
        "eval_score": best["score"],
        "test_score": test["best"]["score"],
        "base": {"eval": sweep.board["base"]["score"], "test": test["base"]["score"]},
        "rows": {"eval": sweep.board["base"]["rows"], "test": test["rows"]},
        "jobs": len(sweep.jobs),
        "stopped": sum(job["status"] == "stopped" for job in sweep.jobs),
        "failed": sum(job["status"] == "failed" for job in sweep.jobs),
        "tokens": sum(job["tokens"] for job in sweep.jobs),
        "slots": 1 + max(event["slot"] for event in placed),
        "refilled": sum(event["micro_step"] > 0 for event in placed),
        "programs": sweep.programs,
        "compile_s": round(sweep.compile_s, 1),
        "seconds": round(sweep.seconds, 1),
        "scores": sorted((job["score"] for job in sweep.jobs if job["score"] is not None), reverse=True),
    }


def compared(full: dict[str, Any], asha: dict[str, Any]) -> dict[str, float]:
    """Return what early stopping lost, in points on the eval and test rows, and its share of the tokens."""
    return {
        "eval_points": 100 * (full["eval_score"] - asha["eval_score"]),
        "test_points": 100 * (full["test_score"] - asha["test_score"]),
        "token_share": asha["tokens"] / full["tokens"],
    }


def replays(full: Finished, slots: int) -> list[dict[str, Any]]:
    """Return what the rules of early_stop_sim would have come to on the record of a full sweep scored as it trained."""
    kept = ("rule", "tokens", "completed", "best", "worse_by", "winner")
    return [{name: row[name] for name in kept} for row in compare(full.path, RULES, slots)]


def run_full(study: Study, seeds: dict[int, Any], seed: int, full: dict[str, Any]) -> None:
    """Train all jobs of a seed to their end."""
    sweep = study.sweep(f"full-{seed}", full)
    seeds[seed] = {"seed": seed, "full": summary(sweep)}
    if study.args.scorings > 1:
        seeds[seed]["replays"] = replays(sweep, study.args.slots)


def run_asha(study: Study, seeds: dict[int, Any], seed: int, full: dict[str, Any]) -> None:
    """Train the same jobs with early stopping, and compare."""
    one = seeds[seed]
    one["asha"] = summary(study.sweep(f"asha-{seed}", stopped(full, study.args.slots)))
    one |= compared(one["full"], one["asha"])


def as_table(seeds: Sequence[dict[str, Any]]) -> str:
    """Lay the seeds' results out; the last line is their mean."""
    head = ["seed", "full eval", "asha eval", "points lost", "full test", "asha test", "tokens", "stopped"]
    rows = [[*head, "slots", "refilled", "full s", "asha s"]]
    done = [one for one in seeds if "asha" in one]
    for one in done:
        full, asha = one["full"], one["asha"]
        scores = [f"{part[name]:.3f}" for name in ("eval_score", "test_score") for part in (full, asha)]
        counts = [f"{asha['stopped']}/{asha['jobs']}", str(asha["slots"]), str(asha["refilled"])]
        numbers = [f"{one['eval_points']:.1f}", *scores[2:], f"{one['token_share']:.1%}"]
        seconds = [f"{part['seconds']:.0f}" for part in (full, asha)]
        rows.append([str(one["seed"]), *scores[:2], *numbers, *counts, *seconds])
    if done:
        mean = [fmean(one[name] for one in done) for name in ("eval_points", "token_share")]
        rows.append(["mean", "", "", f"{mean[0]:.1f}", "", "", f"{mean[1]:.1%}", *[""] * 5])
    return table(rows)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = parser(__doc__)
    out.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    out.add_argument("--configurations", type=int, default=32, metavar="N")
    out.add_argument("--slots", type=int, default=8, metavar="N", help="of the sweep with early stopping")
    out.add_argument("--epochs", type=float, default=2.0, metavar="N")
    out.add_argument(
        "--scorings", type=int, default=ETA**2, metavar="N", help="of a full training (default: every rung)"
    )
    for part, rows in (("train", 512), ("eval", 512), ("test", 1000)):
        out.add_argument(f"--{part}-rows", type=int, default=rows, metavar="N")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and return the exit code."""
    args = options().parse_args(argv)
    if args.slots >= args.configurations:
        options().error("--slots: fewer than --configurations, so that slots are refilled")
    args.work.mkdir(parents=True, exist_ok=True)
    counts = {part: vars(args)[f"{part}_rows"] for part in ("train", "eval", "test")}
    paths = make_task(args.work / "task", args.model, counts)
    data = {part: str(path.absolute()) for part, path in paths.items()}
    study = Study(args)
    rule = EarlyStop("asha", reduction_factor=ETA, grace_period=ETA**-2)
    study.result["expected_share"] = expected_fraction(rule, args.configurations, args.slots)
    seeds: dict[int, dict[str, Any]] = {}
    study.result["seeds"] = seeds
    for seed in args.seeds:
        full = sections(data, args, seed)
        study.part(f"seed {seed}, full", partial(run_full, study, seeds, seed, full))
        study.part(f"seed {seed}, asha", partial(run_asha, study, seeds, seed, full))
    return finish(study, as_table(list(seeds.values())))


if __name__ == "__main__":
    sys.exit(main())
