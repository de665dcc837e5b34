"""Expectation against makespan with early stopping, whole jobs and rung by rung: the table of docs/planner.md.

    python -m scripts.planner.rungs [--out FILE.md]

Ranks and batch sizes are those of the paper; rungs at 1/9 and 1/3, one job in three
passes each.
"""

import argparse
import time
from pathlib import Path
from random import Random

from planner import JobSpec, Ladder, ModelShape, Options, Plan, decoder_shape, devices, make_plan

QWEN_7B = decoder_shape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152_064)
QWEN_05B = decoder_shape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151_936, tied=True)
CASES = [  # model, devices, jobs, rows of each, tokens of a row
    (QWEN_7B, "8xA100-40GB", 120, 7473, 152.0),
    (QWEN_7B, "8xH200", 120, 7473, 152.0),
    (QWEN_7B, "8xH200", 120, 7473, 1024.0),
    (QWEN_7B, "1xH200", 32, 7473, 152.0),
    (QWEN_05B, "1xH200", 32, 7473, 152.0),
    (QWEN_05B, "1xH200", 32, 512, 90.0),
    (QWEN_7B, "64xH200", 1000, 7473, 152.0),
]


def draw(n: int, rows: int, tokens: float) -> list[JobSpec]:
    """Draw jobs of the paper's ranks and batch sizes, scored on a tenth of their rows at every rung and at the end."""
    rng = Random(0)
    longest, scored = int(tokens * 1.5), int(3 * 0.1 * rows * tokens)
    return [
        JobSpec(
            f"job-{i:04d}",
            rng.choice((8, 16, 32, 64, 128)),
            rng.choice((1, 2, 4, 8, 16, 32)),
            rows,
            tokens,
            longest,
            "rows",
            eval_tokens=scored,
        )
        for i in range(n)
    ]


def row(shape: ModelShape, on: str, n: int, rows: int, tokens: float) -> str:
    """Plan one case and return its line of the table."""

    def plan(by_rung: bool | None) -> Plan:
        options = Options(baselines=False, early_stop=lambda _: Ladder(), by_rung=by_rung)
        return make_plan(draw(n, rows, tokens), shape, devices(on), options=options)

    began = time.process_time()
    chosen = plan(None)
    seconds = time.process_time() - began
    staged = chosen if chosen.whole else plan(True)
    assert staged.whole and staged.expected_s and chosen.expected_s
    whole_s, expected_s = staged.whole["makespan_s"], staged.whole["expected_s"]
    cells = [
        f"{n} {shape.name}, {rows} × {tokens:.0f} tokens, {on}",
        f"{whole_s:.0f}",
        f"{expected_s:.0f} ({expected_s / whole_s:.2f})",
        f"{staged.makespan_s:.0f}",
        f"{staged.expected_s:.0f} ({staged.expected_s / whole_s:.2f})",
        "rung by rung" if chosen.whole else "whole jobs",
        f"{seconds:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table, and write it where `--out` says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    head = ["jobs, rows, devices", "whole: makespan, s", "expected", "by rungs: makespan, s", "expected"]
    head += ["chosen", "planned in, CPU s"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [row(*case) for case in CASES]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
