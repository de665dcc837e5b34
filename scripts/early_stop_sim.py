"""Tell from a finished sweep's record what each early-stopping rule would have kept, and spent.

usage: python -m scripts.early_stop_sim RUN [--slots N] [--rule '{method: asha, reduction_factor: 4}' …] [--json FILE]

RUN is a run directory whose jobs were all trained to their end and scored often (`eval`, no `early_stop`). Jobs
take the slots in the order in which they were first scored; a slot's time is the tokens it trains, as in a pack.
A rung without an evaluation is judged, and paid for, at the next one.
"""

import argparse
import heapq
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plora_jax.config.sweep import load_sweep, make_sweep
from plora_jax.config.yamlfile import parse_yaml
from plora_jax.engine.rundir import write_json
from plora_jax.errors import UserError
from plora_jax.search.early_stop import EarlyStop, Point, Rule, make_rule

RULES = [EarlyStop("none"), EarlyStop("median"), EarlyStop("plateau")]
RULES += [EarlyStop(method, reduction_factor=eta) for method in ("asha", "halving") for eta in (2, 3, 4)]
RULES += [EarlyStop("asha", brackets=2)]


@dataclass(frozen=True)
class Recorded:
    """Hold one job of a record: its evaluations, and the tokens of its whole training."""

    points: Sequence[Point]
    tokens: float


@dataclass
class Outcome:
    """Hold what a rule would have done: tokens trained, points seen of each job, and why jobs were stopped."""

    tokens: float = 0.0
    seen: dict[str, list[Point]] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)

    def best(self, rule: Rule, keep: str) -> tuple[float, str]:
        """Return the best score among what would have been exported, as badness, and its job."""

        def kept(points: Sequence[Point]) -> float:
            return min(map(rule.badness, points)) if keep == "best" else rule.badness(points[-1])

        return min((kept(points), job_id) for job_id, points in self.seen.items())


def replay(rule: Rule, record: Mapping[str, Recorded], slots: int) -> Outcome:
    """Run a record again under a rule, in slots that are refilled; jobs begin in the record's order."""
    outcome, order = Outcome(), {job_id: n for n, job_id in enumerate(record)}
    waiting, events = list(record), []

    def begin(clock: float) -> None:
        if waiting:
            job_id = waiting.pop(0)
            heapq.heappush(events, (clock + cost(job_id, 0), order[job_id], job_id, 0))

    def cost(job_id: str, n: int) -> float:
        points = record[job_id].points
        return record[job_id].tokens * (points[n].fraction - (points[n - 1].fraction if n else 0))

    for _ in range(slots):
        begin(0.0)
    while events:
        clock, together = events[0][0], []
        while events and events[0][0] <= clock * (1 + 1e-9):
            together.append(heapq.heappop(events))
        for _, _, job_id, n in together:  # all are scored before any is judged
            outcome.seen.setdefault(job_id, []).append(record[job_id].points[n])
            outcome.tokens += cost(job_id, n)
        for _, _, job_id, n in together:
            verdict = rule.decide(job_id, outcome.seen)
            if verdict.stop:
                outcome.stopped[job_id] = verdict.reason
            elif n + 1 < len(record[job_id].points):
                heapq.heappush(events, (clock + cost(job_id, n + 1), order[job_id], job_id, n + 1))
                continue
            begin(clock)
    return outcome


def read_record(run: Path) -> tuple[dict[str, Recorded], dict[str, Any], str]:
    """Read a run's jobs in the order of their first scores, its leaderboard, and which adapters it kept.

    Raises:
      UserError: the run is not finished, or has no job that was scored while it trained.
    """
    try:
        board = json.loads((run / "leaderboard.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{run}: no leaderboard.json; give the directory of a finished sweep") from None
    found = []
    for row in board["jobs"]:
        path = run / "jobs" / row["job_id"] / "evals.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if lines:
            points = [Point(*(_number(line[name]) for name in Point._fields)) for line in lines]
            job = Recorded(points, row["tokens"] / points[-1].fraction)
            found.append((lines[0]["time"], row["job_id"], job))
    if not any(len(job.points) > 1 for _, _, job in found):
        raise UserError(f"{run}: no job was scored while it trained; set eval.every_steps or every_epochs")
    found.sort(key=lambda item: item[:2])
    return {job_id: job for _, job_id, job in found}, board, load_sweep(run / "sweep.yaml").train.keep


def _number(value: float | None) -> Any:
    return math.nan if value is None else value


def compare(run: Path, configs: Sequence[EarlyStop], slots: int | None) -> list[dict[str, Any]]:
    """Replay a run under each rule; one dictionary a rule."""
    record, board, keep = read_record(run)
    higher, out = board["higher_is_better"], []
    sign = -1 if higher else 1
    whole = replay(make_rule(EarlyStop(), higher), record, len(record))
    for config in configs:
        rule = make_rule(config, higher, board["base"]["loss"])
        outcome = replay(rule, record, slots or len(record))
        (found, job_id), (best, winner) = outcome.best(rule, keep), whole.best(rule, keep)
        out.append(
            {
                "rule": {
                    name: value
                    for name, value in asdict(config).items()
                    if value != getattr(EarlyStop(), name)
                },
                "tokens": outcome.tokens / whole.tokens,
                "jobs": len(record),
                "completed": len(record) - len(outcome.stopped),
                "best": sign * found,
                "best_job": job_id,
                "best_of_all": sign * best,
                "worse_by": found - best,
                "winner": outcome.stopped.get(winner, "completed"),
                "stopped": outcome.stopped,
            }
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a rule."""
    parser = argparse.ArgumentParser(prog="early_stop_sim", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--slots", type=int, metavar="N", help="jobs side by side (default: all)")
    parser.add_argument(
        "--rule", action="append", metavar="YAML", help="an early_stop section; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, reasons included")
    args = parser.parse_args(argv)
    if args.slots is not None and args.slots < 1:
        parser.error(f"--slots {args.slots}: expected at least 1")
    configs = [_config(text) for text in args.rule or ()] or RULES
    rows = compare(args.run, configs, args.slots)
    print(f"{rows[0]['jobs']} jobs; best of all {rows[0]['best_of_all']:.4g}")
    print(f"{'tokens':>7} {'completed':>9} {'best':>9} {'worse by':>9}  {'the best of all':<28} rule")
    for row in rows:
        rule = ", ".join(f"{name}: {value}" for name, value in row["rule"].items()) or "method: none"
        numbers = f"{row['tokens']:7.1%} {row['completed']:9} {row['best']:9.4g} {row['worse_by']:9.3g}"
        print(f"{numbers}  {row['winner'][:28]:<28} {rule}")
    if args.json:
        write_json(args.json, rows)
    return 0


def _config(text: str) -> EarlyStop:
    section, faults = parse_yaml(text, "--rule")
    faults.check()
    return make_sweep(model="-", data={"train": "-"}, early_stop=section).early_stop


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"early_stop_sim: {error}")
