"""The leaderboard: every job's result, best first, as JSON, as CSV and on the screen."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plora_jax.engine.rundir import RunDirectory, write_atomic, write_json
from plora_jax.evaluation.metrics import higher_is_better
from plora_jax.jobs import Job

if TYPE_CHECKING:  # evaluate computes with JAX, which readers of a leaderboard need not
    from plora_jax.evaluation.scorer import Score


@dataclass(frozen=True)
class Result:
    """Hold how one job ended; `score` is None for a job that failed."""

    job: Job
    status: str  # completed | stopped | failed
    score: "Score | None"
    steps: int
    tokens: int
    reason: str = ""
    adapter: str = ""

    def row(self) -> dict[str, Any]:
        """Return the job's line of the leaderboard."""
        return {
            "job_id": self.job.job_id,
            "status": self.status,
            "score": self.score.score if self.score else None,
            "loss": self.score.loss if self.score else None,
            "low": self.score.low if self.score else None,
            "high": self.score.high if self.score else None,
            "steps": self.steps,
            "tokens": self.tokens,
            "reason": self.reason,
            "adapter": self.adapter,
            **self.job.to_dict(),
        }


def read_results(run: RunDirectory, jobs: Iterable[str]) -> list[Result]:
    """Return how jobs ended, of those whose record is whole and whose adapter is there."""
    return [result for result in (_read_result(run, job_id) for job_id in jobs) if result]


def _read_result(run: RunDirectory, job_id: str) -> Result | None:
    from plora_jax.evaluation.scorer import Score
    from plora_jax.peft import WEIGHTS

    record = run.read_json(f"jobs/{job_id}/job.json")
    try:
        job = Job.from_dict(record["job"])
        score = Score(**record["score"]) if record["score"] else None
        names = ("steps", "tokens", "reason", "adapter")
        result = Result(job, record["status"], score, *(record[name] for name in names))
    except (KeyError, TypeError, AttributeError):
        return None
    kept = not result.adapter or (run.path / result.adapter / WEIGHTS).exists()
    return result if kept else None


def rank(results: list[Result], metric: str) -> list[dict[str, Any]]:
    """Return the rows of the leaderboard, ordered by `rank_rows`."""
    return rank_rows([result.row() for result in results], higher_is_better(metric))


def rank_rows(rows: list[dict[str, Any]], higher_is_better: bool) -> list[dict[str, Any]]:
    """Return the rows best first: by the mean score of a configuration over its seeds, then by score, then by loss.

    Jobs that differ in `seed` alone are one configuration; its `seeds` and `mean_score` are written into the rows.
    Failed jobs, and scores that are no numbers, come last.
    """
    sign = -1.0 if higher_is_better else 1.0

    def configuration(row: dict[str, Any]) -> str:
        return repr({key: value for key, value in row.items() if key in _CONFIGURATION})

    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[configuration(row)].append(math.inf if _missing(row["score"]) else sign * row["score"])
    for row in rows:
        scores = groups[configuration(row)]
        row["seeds"] = len(scores)
        row["mean_score"] = None if math.inf in scores else sign * sum(scores) / len(scores)

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        last = math.inf
        mean = last if _missing(row["mean_score"]) else sign * row["mean_score"]
        own = last if _missing(row["score"]) else sign * row["score"]
        return (
            row["status"] == "failed",
            mean,
            own,
            last if _missing(row["loss"]) else row["loss"],
            row["job_id"],
        )

    return sorted(rows, key=key)


_SHORT = {"learning_rate": "lr", "batch_size": "batch", "weight_decay": "decay"}
_CONFIGURATION = set(Job.__dataclass_fields__) - {"seed"}


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f}–{high:.3f}"


def write_leaderboard(
    run: RunDirectory, metric: str, base: "Score", rows: list[dict[str, Any]], test: dict[str, Any] | None
) -> None:
    """Write leaderboard.json and leaderboard.csv; `test` holds the scores of base and best on the test part."""
    write_json(
        run.path / "leaderboard.json",
        {
            "metric": metric,
            "higher_is_better": higher_is_better(metric),
            "base": vars(base),
            "test": test,
            "jobs": rows,
        },
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(run.path / "leaderboard.csv", text.getvalue())


def print_leaderboard(
    console: Console,
    metric: str,
    base: "Score",
    rows: list[dict[str, Any]],
    test: dict[str, Any] | None,
    out: Path,
) -> None:
    """Print the leaderboard: the base model, then the jobs best first with the fields in which they differ."""
    differing = [name for name in Job.__dataclass_fields__ if len({repr(row[name]) for row in rows}) > 1]
    told = any(row["status"] != "completed" for row in rows)
    table = Table(
        title=f"leaderboard: {metric} on {base.rows} held-out rows", title_justify="left", box=box.SIMPLE
    )
    for name in ("", "job", "score", "95 %", "loss", *differing, "steps", *(["status"] if told else [])):
        text = name in ("job", "status")
        table.add_column(_SHORT.get(name, name), justify="left" if text else "right", no_wrap=name == "job")
    table.add_row("", "base model", f"{base.score:.3f}", _interval(base.low, base.high), f"{base.loss:.3f}")
    for place, row in enumerate(rows, 1):
        score, loss = ("–" if _missing(row[name]) else f"{row[name]:.3f}" for name in ("score", "loss"))
        fields = [f"{row[n]:g}" if isinstance(row[n], float) else str(row[n]) for n in differing]
        numbers = (score, _interval(row["low"], row["high"]), loss)
        status = [Text(row["status"] + (f": {row['reason']}" if row["reason"] else ""))] if told else []
        table.add_row(str(place), row["job_id"], *numbers, *map(Text, fields), str(row["steps"]), *status)
    console.print(table)
    best = rows[0]
    if best["status"] == "failed":
        console.print("no job was completed")
        return
    if test:
        console.print(
            f"on {test['rows']} test rows, seen by no choice: base {test['base']['score']:.3f}, "
            f"{best['job_id']} {test['best']['score']:.3f}"
        )
    else:
        console.print("without a test part the winner's score is optimistic: it was chosen on these rows")
    console.print(
        f"best adapter: {out / best['adapter']}", soft_wrap=True, highlight=False, markup=False, emoji=False
    )
