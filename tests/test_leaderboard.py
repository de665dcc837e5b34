"""The leaderboard on the screen."""

import io
from pathlib import Path

from rich.console import Console

from plora_jax.evaluation.leaderboard import Result, print_leaderboard, rank
from plora_jax.evaluation.scorer import Score
from plora_jax.jobs import Job


def test_names_from_the_user_are_shown_as_they_are() -> None:
    score = Score(score=1.0, loss=1.0, rows=3, tokens=5)
    jobs = [Job(train="[/b].jsonl"), Job(train=":cat:[red].jsonl")]
    results = [Result(job, "completed", score, 1, 5, adapter=f"jobs/{job.job_id}/adapter") for job in jobs]
    shown = io.StringIO()
    rows = rank(results, "loss")
    console = Console(file=shown, width=160)
    print_leaderboard(console, "loss", score, rows, None, Path("runs/[/x] [bold]:cat:"))
    assert f"best adapter: runs/[/x] [bold]:cat:/{rows[0]['adapter']}\n" in shown.getvalue()
    assert "[/b].jsonl" in shown.getvalue() and ":cat:[red].jsonl" in shown.getvalue()
