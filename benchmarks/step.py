"""Measure the packed step's switches, its table of shapes, PEFT beside it and the planner's points, in full calls.

    python -m benchmarks.step --plan 1 --out step-1.jsonl      which switches win at 7B, 8 × 1 × 1024
    python -m benchmarks.step --plan 2 --out step-2.jsonl      the 7B and 8B shapes, with PEFT
    python -m benchmarks.step --plan 3 --out step-3.jsonl      the 3B and 0.5B shapes, with PEFT
    python -m benchmarks.step --plan 4 --out step-4.jsonl      steps for the planner's model of time
    python -m benchmarks.step --plan 5 --out step-5.jsonl      7B on an fp8 base, beside bf16

The most important case comes first, a line is written as each ends, and a case that fails or hangs ends its worker
process alone. `--seconds` bounds a call: what does not fit any more is left out and named. `--cases FILE` takes other
cases: a JSON list of objects with the arguments of `plora_jax.bench.step.measure_step`, and `label`, `model`,
`precision`, `kernels`, `head_chunk`, or `peft`: [[m, length], …].
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

QWEN = {size: f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B")}
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CASE_SECONDS = 200  # after which a worker is given up
TRITON = {"xla_gpu_enable_triton_gemm": True}  # which the step leaves out where layers are written out
SCANNED = {"unroll": 1, "kernels": "xla"}


def shape(model: str, jobs: int, m: int, length: int, rank: int = 32, **more: Any) -> dict[str, Any]:
    name = f"{model.rsplit('/', 1)[-1]} {jobs}x{m}x{length}"
    return {"label": name, "model": model, "jobs": jobs, "m": m, "length": length, "rank": rank} | more


def switches() -> list[dict[str, Any]]:
    """Vary one thing at a time around the step expected to be best, the largest expected gain first."""
    deep = {"unroll": 28, "kernels": "xla"}

    def case(label: str, **more: Any) -> dict[str, Any]:
        given = {"recompute": "dots", "runtime": SCANNED} | more
        return shape(QWEN["7B"], 8, 1, 1024, **given) | {"label": label}

    return [
        case("unrolled", runtime=deep, options=TRITON, ceiling=True, parts=True),
        case("unrolled, fused kernel", runtime=deep, options=TRITON, kernels="auto", parts=True),
        case("scanned", parts=True),
        case("unrolled, no Triton products", runtime=deep, parts=True),
        case("unrolled, gradients summed", runtime=deep, accumulate=True),
        case("unrolled, nothing recomputed", runtime=deep, recompute="none"),
        case("unrolled, fused kernel, layers recomputed", runtime=deep, kernels="auto", recompute="layer"),
        case("unrolled, head in chunks of 4096", runtime=deep, head_chunk=4096),
        case("unrolled, no command buffers", runtime=deep, options={"xla_gpu_enable_command_buffer": ""}),
        case("scanned, fused kernel", kernels="auto"),
        case("scanned, layers recomputed", recompute="layer"),
        case("scanned, a quarter recomputed", runtime=SCANNED | {"recomputed": 7}),
        case("two micro-steps a dispatch", micro_steps=2, repeats=5),
        case(
            "unrolled, latency hiding",
            runtime=deep,
            options={"xla_gpu_enable_latency_hiding_scheduler": True},
        ),
        case("unrolled, from the cache", runtime=deep, cached=True, repeats=3),
    ]


def peft(model: str, *shapes: tuple[int, int]) -> dict[str, Any]:
    return {"label": f"PEFT {model.rsplit('/', 1)[-1]}", "model": model, "peft": shapes, "rank": 32}


def table_large() -> list[dict[str, Any]]:
    full = {"ceiling": True, "parts": True}
    seven = QWEN["7B"]
    return [
        peft(seven, (1, 1024), (1, 256), (1, 128)),
        shape(seven, 8, 1, 1024, **full),
        shape(seven, 32, 1, 128, **full),
        shape(seven, 32, 1, 256, **full),
        shape(LLAMA, 4, 1, 1536, rank=16, **full),
        shape(seven, 32, 1, 1024, recompute="auto", repeats=5),
        shape(seven, 8, 4, 256, **full),
    ]


def table_small() -> list[dict[str, Any]]:
    full = {"ceiling": True, "parts": True}
    three, half = QWEN["3B"], QWEN["0.5B"]
    return [
        peft(three, (1, 1024)),
        shape(three, 32, 1, 1024, recompute="dots", repeats=6, **full),
        shape(three, 32, 1, 1024, recompute="dots", repeats=6, runtime=SCANNED)
        | {"label": "Qwen2.5-3B-Instruct 32x1x1024, scanned"},
        peft(half, (1, 1024), (1, 128)),
        shape(half, 32, 1, 128, **full),
        shape(half, 32, 1, 128, micro_steps=4, repeats=5),
        shape(half, 32, 1, 1024, **full),
        shape(three, 8, 1, 1024, **full),
        shape(three, 32, 1, 128),
    ]


def fp8_base() -> list[dict[str, Any]]:
    """Measure 7B at 8 × 1 × 1024 on an fp8 base, written out and scanned, both formats of output gradients."""

    def case(label: str, precision: str = "fp8", backward: str = "e4m3", **more: Any) -> dict[str, Any]:
        runtime = {"fp8_backward": backward} | (SCANNED if "scanned" in label else {})
        return shape(QWEN["7B"], 8, 1, 1024, precision=precision, runtime=runtime, **more) | {"label": label}

    return [
        case("fp8, e4m3", parts=True, ceiling=True),
        case("fp8, e5m2", backward="e5m2"),
        case("fp8, scanned, e4m3", recompute="dots", parts=True),
        case("fp8, scanned, e5m2", recompute="dots", backward="e5m2"),
        case("fp8, scanned, layers recomputed", recompute="layer"),
        case("bf16", precision="bf16", parts=True),
        case("bf16, scanned", precision="bf16", recompute="dots"),
    ]


def planner_points() -> list[dict[str, Any]]:
    """Twenty distinct steps of one model: jobs, lengths and ranks that tell the terms of the time model apart."""
    sizes = [
        (1, 1024, 8), (8, 1024, 32), (4, 1024, 64), (16, 256, 32), (32, 128, 8), (2, 512, 16), (8, 512, 128),
        (1, 256, 64), (16, 512, 16), (4, 256, 8), (32, 256, 16), (2, 1024, 128), (8, 256, 64), (1, 512, 32),
        (16, 128, 64), (4, 512, 16), (12, 1024, 16), (24, 128, 32), (6, 768, 32), (3, 384, 64),
    ]  # fmt: skip
    return [shape(QWEN["7B"], J, 1, S, rank=r, recompute="dots", repeats=6) for J, S, r in sizes]


PLANS = {1: switches, 2: table_large, 3: table_small, 4: planner_points, 5: fp8_base}


# --- the worker: one process, one device, cases as JSON lines --------------------------------------------------


def work() -> None:
    """Read cases from standard input, one a line, and answer each with one line of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes to the log
    held: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line), held)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).strip()}"[:500]}
        answers.write(json.dumps(answer) + "\n")


def measure(case: dict[str, Any], held: dict[str, Any]) -> dict[str, Any]:
    """Run one case; `held` keeps the last model between cases."""
    from pallas_kernels import using
    from plora_jax.bench.step import measure_step
    from plora_jax.models.load import load_base
    from plora_jax.training import step

    if case.pop("crash", False):  # to see that the next case still runs
        os._exit(9)
    model, kernels = case.pop("model"), case.pop("kernels", None)
    precision = case.pop("precision", "auto")
    case.pop("label", None)
    if chunk := case.pop("head_chunk", None):
        step._train_step.cache_clear()
        before, step.HEAD_CHUNK = step.HEAD_CHUNK, chunk
    try:
        if held.get("name") != (model, precision):
            held.clear()  # the old weights first
            base = load_base(model, random_weights=True, precision=precision)
            held.update(base=base, name=(model, precision))
        with using(kernels) if kernels else contextlib.nullcontext():
            return measure_step(held["base"], **case)
    finally:
        if chunk:
            step.HEAD_CHUNK = before
            step._train_step.cache_clear()


class Worker:
    """Hold a worker process; `ask` starts it anew when the last case ended it."""

    def __init__(self, log: Path) -> None:
        self.log, self.process = log, None

    def ask(self, case: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the case's answer, or what went wrong; never raises for a case."""
        if self.process is None:
            self._start()
        process, lines = self.process, self.lines
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            line = lines.get(timeout=seconds)
        except (queue.Empty, BrokenPipeError) as error:
            why = (
                f"no answer within {seconds:.0f} s"
                if isinstance(error, queue.Empty)
                else "the worker had ended"
            )
            self.stop()
            return {"error": why}
        if line:
            return json.loads(line)
        code = process.wait()
        self.stop()
        return {"error": f"the worker ended with code {code}"}

    def _start(self) -> None:
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", "TF_CPP_MIN_LOG_LEVEL": "2"}
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.step", "--worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen, lines: queue.Queue) -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def stop(self) -> None:
        """End the process and give its device memory back."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


# --- the caller ------------------------------------------------------------------------------------------------


def run(
    cases: list[dict[str, Any]], out: Path, seconds: float, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run cases in order until the time is up; write and return a line for each."""
    end = time.monotonic() + seconds
    worker, rows = Worker(out.with_suffix(".log")), []
    slowest = 0.0
    with open(out, "w") as file:
        for number, given in enumerate(cases):
            case = settle(given, common)
            left = end - time.monotonic()
            if left < min(20.0, seconds / 4):
                rows.append({"label": case["label"], "skipped": "no time left"})
            else:
                start = time.monotonic()
                limit = min(left, CASE_SECONDS)
                if "peft" in case:
                    worker.stop()
                    answer = compare(case, limit)
                else:
                    answer = worker.ask(case, limit)
                took = time.monotonic() - start
                slowest = max(slowest, took)
                rows.append({"label": case["label"], "case": case, "wall_s": round(took, 1)} | answer)
            file.write(json.dumps({"number": number, "date": time.strftime("%Y-%m-%d")} | rows[-1]) + "\n")
            file.flush()
            print(line_of(rows[-1]), flush=True)
    worker.stop()
    return rows


def settle(case: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """Give a case what all share, where it says nothing itself; an unroll of "all" is the model's depth."""
    runtime = {**common.get("runtime", {}), **case.get("runtime", {})}
    merged = {**common, **case}
    if case.get("peft"):
        return dict(case)
    if runtime.get("unroll") == "all":
        from plora_jax.models.find import load_config

        runtime["unroll"] = load_config(case["model"]).n_layers
    return merged | ({"runtime": runtime} if runtime else {})


def compare(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Time PEFT's step in a process of its own."""
    from plora_jax.bench.peft import run_peft

    try:
        return {"peft": run_peft(case["model"], case["peft"], case["rank"], seconds=seconds)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip()}"[:500]}


def line_of(row: dict[str, Any]) -> str:
    """Say one row in a line."""
    if "peft" in row:
        found = [f"{p['m']}x{p['length']} {p['tokens_s']:,.0f} tokens/s" for p in row["peft"]]
        return f"{row['label']:36s} {', '.join(found)}"
    if "ms" not in row:
        return f"{row['label']:36s} {row.get('error') or row.get('skipped') or 'compiled'}"
    text = f"{row['label']:36s} {row['tokens_s']:10,.0f} tokens/s {row['ms'][0]:8.1f} ms"
    if "compile_s" in row:
        total, predicted = (row[name] / 2**30 for name in ("total_bytes", "predicted_bytes"))
        text += f" {row['compile_s']:6.1f} s {total:6.1f} GiB ({predicted:.1f})"
    if "ceiling" in row:
        text += f" {100 * row['ceiling']['share']:.0f} % of {row['ceiling']['tokens_s']:,.0f}"
    if "parts" in row:
        text += "\n    " + ", ".join(f"{name} {ms:.1f}" for name, ms in row["parts"].items())
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", type=int, choices=sorted(PLANS), help="which cases to run")
    parser.add_argument("--cases", type=Path, metavar="FILE", help="run these cases instead")
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="settings of every case")
    parser.add_argument("--seconds", type=float, default=540, help="time for the whole call (default: 540)")
    parser.add_argument(
        "--out", type=Path, default=Path("step.jsonl"), metavar="FILE", help="JSON lines to write"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return 0
    if not (args.plan or args.cases):
        parser.error("give --plan or --cases")
    cases = json.loads(args.cases.read_text()) if args.cases else PLANS[args.plan]()
    rows = run(cases, args.out, args.seconds, args.set)
    print("\n" + "\n".join(line_of(row).split("\n")[0] for row in rows))
    return int(not any(name in row for row in rows for name in ("ms", "total_bytes", "peft")))


if __name__ == "__main__":
    sys.exit(main())
