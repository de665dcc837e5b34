"""What people are told of a run's speed: compilation does not count, and the time left is of the work left."""

import io

from rich.console import Console

from plora_jax.engine import progress
from plora_jax.engine.progress import Progress, clock


def test_rate_and_time_left_leave_compilation_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = Progress(Console(file=io.StringIO()), total=1000.0)
    shown.phase("training")
    assert shown.state() == "training: 0%, starting"
    now[0] = 60.0  # the first micro-step compiles
    shown.advance(100.0, 50)
    assert shown.state() == "training: 10%"
    for _ in range(2):
        now[0] += 2.0
        shown.advance(100.0, 50, "loss 1.5")
    assert shown.state() == "training: 30%, 25 tokens/s, 0m14s left, loss 1.5"  # 200 in 4 s; 700 are left
    shown.phase("scoring")
    now[0] += 30.0
    shown.advance(100.0)
    assert shown.state() == "scoring: 40%, 25 tokens/s, 0m12s left"
    assert clock(3725) == "1h02m"
