"""Kill a sweep over and over, resume it, and compare what it comes to with an undisturbed run, bit for bit.

    python -m scripts.kill_test --kills 50 --points 10 --out benchmarks/results/kill-test.json

A tiny Llama with random weights is swept by two worker processes on the CPU: sixteen jobs in two packs, more jobs than
slots, evaluations on the way, with `asha` early stopping, and with that planned rung by rung. Kills at random moments
come from outside (SIGKILL to the driver or to a worker); kills at chosen points (while a checkpoint is written, an
adapter exported, a line journaled) come from the process itself (plora_jax/engine/faults.py). After the driver's death
the same command with --resume goes on. Everything random follows from --seed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests import tiny

CHECKPOINT_S = 0.5  # seconds between two checkpoints
LIMIT_S = 900.0  # after which a start of the sweep hangs
STARTING_S = 15.0  # in which a start is under way
WORDS = tiny.WORDS
ROWS = [
    {"prompt": f"what is the {a} {b} ?", "completion": f" {c}"}
    for a in WORDS[:5]
    for b in WORDS[3:8]
    for c in ("yes", "no")
]
POINTS = {  # and the highest count at which it is drawn
    "checkpoint": 3,
    "checkpoint-sync": 3,
    "checkpoint-commit": 3,
    "checkpoint-prune": 3,
    "export": 3,
    "export-rename": 3,
    "step": 60,
    "journal": 12,
    "journal-act": 12,
    "job.json": 3,
    "leaderboard.json": 1,
    "leaderboard.csv": 1,
    "pause": 3,
    "pause-journal": 3,
    "rung": 1,
}
AT_RUNGS = ("pause", "pause-journal", "rung")  # reached by the variant `rungs` alone


@dataclass
class Kill:
    """Tell of one kill: of whom, how long after the start of the sweep, in what phase, and what it cost."""

    who: str  # driver, worker or a fault point
    at_s: float
    phase: str = ""
    recovery_s: float | None = None  # until a worker trained again


@dataclass
class Trial:
    """Tell of one run that was killed and resumed until it was done."""

    seed: int
    variant: str
    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    different: list[str] = field(default_factory=list)


def write_sweep(root: Path, variant: str, steps: int, **train: Any) -> Path:
    """Write model, data and a sweep of sixteen jobs: three of `steps` optimizer steps, the others of a sixth."""
    jobs = [
        {
            "rank": (4, 8)[i % 2],
            "learning_rate": (1e-3, 3e-3, 1e-2, 3e-2)[i % 4],
            "batch_size": (2, 4)[(i // 2) % 2],
            "max_steps": steps if i in (0, 3, 6) else steps // 6 + 5 * (i % 3),
            "seed": i,
        }
        for i in range(16)
    ]
    folder = root / variant
    folder.mkdir(parents=True)
    tiny.write_model(folder / "model")
    tiny.write_weights(folder / "model")
    tiny.write_rows(folder / "train.jsonl", ROWS)
    tiny.write_rows(folder / "eval.jsonl", ROWS[::7])
    return tiny.write_sweep(
        folder,
        search={"jobs": jobs},
        train={"dropout": 0.1, "keep": "best", **train},
        eval={"every_steps": max(1, steps // 10)},
        early_stop={
            "none": None,
            "asha": {"method": "asha", "pause": "never"},
            "rungs": {"method": "asha", "pause": "always"},
        }[variant],
    )


class Sweep:
    """Run one sweep as a user does, in processes of its own."""

    def __init__(self, sweep: Path, run: Path, cache: Path) -> None:
        self.sweep, self.run, self.log = sweep, run, run.with_suffix(".log")
        self.env = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        if self.env.pop("PYTHONDONTWRITEBYTECODE", None):  # half of a start would be compiling Python
            self.env["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "plora-bytecode")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, faults: str = "") -> None:
        """Start the sweep, or go on with it."""
        command = [sys.executable, "-m", "plora_jax", "sweep", str(self.sweep), "--out", str(self.run)]
        command += ["--resume", "--workers", "2", "--checkpoint-every", str(CHECKPOINT_S)]
        env = self.env | ({"PLORA_FAULT": faults, "PLORA_FAULT_ONCE": f"{self.run}.once"} if faults else {})
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def workers(self) -> list[int]:
        """Return the process ids of this run's workers that live."""
        return [int(p.name) for p in Path("/proc").glob("[0-9]*") if self._is_worker(p)]

    def _is_worker(self, process: Path) -> bool:
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.fsencode(self.run) in command and b"--worker" in command

    def statuses(self) -> Iterator[dict[str, Any]]:
        """Read what the workers said of themselves last."""
        for path in sorted((self.run / "workers").glob("*.json")):
            try:
                yield json.loads(path.read_text())
            except (OSError, ValueError):
                continue

    def wait(self, seconds: float) -> int | None:
        """Wait for the driver's end; its exit code, or None while it runs."""
        assert self.process
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def logged(self) -> int:
        """Count the bytes of all metrics.jsonl: how far the run has come."""
        return sum(path.stat().st_size for path in self.run.glob("jobs/*/metrics.jsonl"))

    def until(self, logged: float) -> int | None:
        """Wait until so many bytes are logged; the driver's exit code where it ended first."""
        deadline = time.monotonic() + LIMIT_S
        while self.logged() < logged:
            if (code := self.wait(0.005)) is not None:
                return code
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.run} does not get on:\n{self.log.read_text()[-3000:]}")
        return None

    def kill(self, who: str, choose: random.Random) -> str:
        """Kill the driver or one worker and return the phase it was in; workers end with their driver."""
        assert self.process
        phases = {status["pid"]: status.get("phase", "") for status in self.statuses()}
        alive = self.workers()
        if who == "worker" and alive:
            pid = choose.choice(sorted(alive))
            os.kill(pid, signal.SIGKILL)
            return str(phases.get(pid, "starting")).split(",")[0]
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 10
        while left := self.workers():
            if time.monotonic() > deadline:
                raise AssertionError(f"workers {left} outlived their driver")
            time.sleep(0.02)
        return (
            "; ".join(sorted({str(phases[pid]).split(",")[0] for pid in alive if pid in phases}))
            or "starting"
        )


def results(run: Path) -> dict[str, Any]:
    """Return all that a run has come to, without the times in it."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if not path.is_file() or path.is_symlink() or name.startswith("best/"):
            continue
        if name.startswith("jobs/") or name in (
            "leaderboard.json",
            "leaderboard.csv",
            "base.json",
            "test.json",
        ):
            found[name] = path.read_bytes()
            if name.endswith("evals.jsonl"):
                lines = [json.loads(line) for line in found[name].splitlines()]
                found[name] = [{key: v for key, v in line.items() if key != "time"} for line in lines]
    found["best"] = os.readlink(run / "best")
    return found


def differences(want: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Name the files that are not equal, or not in both."""
    return sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name))


def recoveries(run: Path, kills: list[tuple[Kill, float]]) -> None:
    """Note for each kill how long it took until a worker trained again, from the run's events."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_bytes().splitlines()]
    times = sorted(line["time"] for line in lines if line["event"] in ("restored", "placed"))
    for kill, when in kills:
        kill.recovery_s = next((round(t - when, 2) for t in times if t > when), None)


def undisturbed(sweep: Path, run: Path, cache: Path) -> dict[str, Any]:
    """Run a sweep to its end and return what it has come to."""
    one = Sweep(sweep, run, cache)
    one.start()
    if (code := one.wait(LIMIT_S)) != 0:
        raise RuntimeError(f"the undisturbed run ended with {code}:\n{one.log.read_text()[-3000:]}")
    return results(run)


def kill_at_random(
    sweep: Path, run: Path, cache: Path, want: dict[str, Any], *, seed: int, kills: int
) -> Trial:
    """Kill the driver or a worker at `kills` random moments and compare the end.

    A moment is a share of the whole training; one in four is a time after a start instead, when little is running yet.
    """
    choose, one = random.Random(seed), Sweep(sweep, run, cache)
    trial, began, made = Trial(seed, sweep.parent.name), time.monotonic(), []
    whole = sum(len(content) for name, content in want.items() if name.endswith("metrics.jsonl"))
    code, killed = None, 0
    one.start()
    trial.starts = 1
    for share in sorted(choose.random() for _ in range(kills)):
        if choose.random() < 0.75:
            code = one.until(share * whole) or one.wait(choose.uniform(0.0, 0.1))
        else:
            code = one.wait(choose.uniform(0.0, STARTING_S))
        if code is not None:
            break
        # a pack that was lost three times between two checkpoints is given up
        who = "driver" if killed == 2 else choose.choice(("driver", "worker"))
        killed = 0 if who == "driver" else killed + 1
        phase = one.kill(who, choose)
        kill = Kill(who, round(time.monotonic() - began, 2), phase)
        trial.kills.append(kill)
        made.append((kill, time.time()))
        if who == "driver":
            one.start()
            trial.starts += 1
    _to_the_end(one, trial, code)
    recoveries(run, made)
    trial.seconds, trial.different = round(time.monotonic() - began, 2), differences(want, results(run))
    return trial


def kill_at_points(
    sweep: Path, run: Path, cache: Path, want: dict[str, Any], *, seed: int, points: list[str]
) -> Trial:
    """Let processes kill themselves at fault points (`point:n`), each once, and compare the end."""
    one, trial, began = Sweep(sweep, run, cache), Trial(seed, sweep.parent.name), time.monotonic()
    faults = ",".join(f"{point}=kill" for point in points)
    one.start(faults)
    trial.starts = 1
    _to_the_end(one, trial, None, faults)
    once = Path(f"{run}.once")
    made = []
    for path in sorted(once.glob("*"), key=lambda p: p.stat().st_mtime):
        when = path.stat().st_mtime
        kill = Kill(
            path.name.removesuffix("=kill"), round(when - (time.time() - (time.monotonic() - began)), 2)
        )
        trial.kills.append(kill)
        made.append((kill, when))
    recoveries(run, made)
    trial.seconds, trial.different = round(time.monotonic() - began, 2), differences(want, results(run))
    return trial


def _to_the_end(one: Sweep, trial: Trial, code: int | None, faults: str = "") -> None:
    while True:
        code = one.wait(LIMIT_S) if code is None else code
        if code == 0:
            return
        if code is None:
            os.kill(one.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            raise AssertionError(f"{one.run} hangs (seed {trial.seed}):\n{one.log.read_text()[-3000:]}")
        if code != -signal.SIGKILL:
            raise AssertionError(
                f"{one.run} ended with {code} (seed {trial.seed}):\n{one.log.read_text()[-3000:]}"
            )
        one.start(faults)
        trial.starts += 1
        code = None


def draw_points(choose: random.Random, due: dict[str, int]) -> list[str]:
    """Take two fault points of the workers and one of the driver, those that are due most often first.

    Two, because a pack that is lost three times between two checkpoints is given up.
    """
    names = [name for name in due if due[name] > 0]
    names.sort(key=lambda name: (-due[name], choose.random()))
    drivers = [name for name in names if name.startswith("leaderboard")]
    workers = [name for name in names if name not in drivers]
    return [f"{name}:{choose.randint(1, POINTS[name])}" for name in (*workers[:2], *drivers[:1])]


def table(trials: list[Trial]) -> str:
    """Return the Markdown table of what was killed, how often, and what became of it."""
    kills = [(kill, trial) for trial in trials for kill in trial.kills]
    lines = ["| killed | kills | runs | runs equal | recovery, s (median, most) |", "|---|---|---|---|---|"]
    for who in dict.fromkeys(kill.who.split(":")[0] for kill, _ in kills):
        mine = [(kill, trial) for kill, trial in kills if kill.who.split(":")[0] == who]
        runs = {(trial.variant, trial.seed): not trial.different for _, trial in mine}
        took = [kill.recovery_s for kill, _ in mine if kill.recovery_s is not None] or [float("nan")]
        name = f"{who}, any moment" if who in ("driver", "worker") else f"at `{who}`"
        lines.append(
            f"| {name} | {len(mine)} | {len(runs)} | {sum(runs.values())} "
            f"| {statistics.median(took):.1f}, {max(took):.1f} |"
        )
    equal = sum(not trial.different for trial in trials)
    lines.append(f"| **all** | **{len(kills)}** | **{len(trials)}** | **{equal}** | |")
    return "\n".join(lines)


def main() -> int:
    """Run the trials, print them as they end, and write them down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="kills at random moments (default: 50)")
    parser.add_argument("--each", type=int, default=4, help="of them in one run (default: 4)")
    parser.add_argument("--points", type=int, default=10, help="kills at each fault point (default: 10)")
    parser.add_argument(
        "--steps", type=int, default=1200, help="optimizer steps of the longest jobs (default: 1200)"
    )
    parser.add_argument(
        "--variants", default="none,asha,rungs", help="kinds of early stopping (default: none,asha,rungs)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the trials as JSON")
    args = parser.parse_args()
    root, choose, trials = Path(tempfile.mkdtemp(prefix="kill-test-")), random.Random(args.seed), []
    variants, want = args.variants.split(","), {}
    for variant in variants:
        sweep = write_sweep(root, variant, args.steps)
        want[variant] = undisturbed(sweep, root / variant / "compiles", root / "cache")
        began = time.monotonic()
        again = undisturbed(sweep, root / variant / "want", root / "cache")
        told = f"undisturbed, early stopping {variant}: {time.monotonic() - began:.1f} s"
        print(f"{told}, {'equal' if again == want[variant] else 'DIFFERENT'}", flush=True)

    def done(trial: Trial, run: Path) -> None:
        trials.append(trial)
        killed = ", ".join(f"{k.who}@{k.at_s:.1f}s{f' ({k.phase})' if k.phase else ''}" for k in trial.kills)
        verdict = f"DIFFERENT: {', '.join(trial.different)}" if trial.different else "equal"
        print(f"seed {trial.seed} {trial.variant}: {killed}; {trial.seconds:.0f} s: {verdict}", flush=True)
        if not trial.different:
            shutil.rmtree(run)

    seed, left = args.seed * 1000, args.kills
    while left > 0:
        seed, variant = seed + 1, variants[seed % len(variants)]
        run = root / variant / str(seed)
        trial = kill_at_random(
            root / variant / "sweep.yaml",
            run,
            root / "cache",
            want[variant],
            seed=seed,
            kills=min(args.each, left),
        )
        left -= len(trial.kills)
        done(trial, run)
    due = {name: args.points for name in POINTS if name not in AT_RUNGS or "rungs" in variants}
    while any(count > 0 for count in due.values()):
        seed, variant = seed + 1, variants[seed % len(variants)]
        reached = {name: due[name] for name in due if name not in AT_RUNGS or variant == "rungs"}
        run, points = root / variant / str(seed), draw_points(choose, reached)
        if not points:
            continue
        trial = kill_at_points(
            root / variant / "sweep.yaml", run, root / "cache", want[variant], seed=seed, points=points
        )
        for kill in trial.kills:
            due[kill.who.split(":")[0]] -= 1
        done(trial, run)
    print(table(trials))
    if args.out:
        versions = {"python": sys.version.split()[0], "cores": os.cpu_count()}
        record = {**versions, "trials": [asdict(trial) for trial in trials]}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    different = [trial for trial in trials if trial.different]
    if not different:
        shutil.rmtree(root)
    else:
        print(f"the runs that differ are in {root}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
