"""The command `plora`. Nothing heavy is imported until the command that needs it runs.

Exit codes: 0 done, 1 some jobs failed, 2 the input is wrong (one message, nothing written),
130 and 143 interrupted by Ctrl-C or SIGTERM, and resumable.
"""

import argparse
import contextlib
import errno
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from plora_jax.errors import UserError

if TYPE_CHECKING:
    from plora_jax.config.sweep import Sweep
    from plora_jax.jobs import Job


class _Terminated(BaseException):
    """SIGTERM arrived: unwind as for Ctrl-C, so that files are closed and locks let go."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, with the way to the help, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def format_help(self) -> str:
        """Add the job fields to the help of commands that read a sweep."""
        if not self.prog.endswith((" plan", " sweep")):
            return super().format_help()
        from plora_jax.config.space import field_lines

        title = "job fields of SWEEP.yaml, under search or train (docs/config.md has the rest):"
        return "\n  ".join([f"{super().format_help()}\n{title}", *field_lines()]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        with _interruptible():
            code = int(args.run(args))
            sys.stdout.flush()
            return code
    except UserError as error:
        return _say(args, str(error), 2)
    except KeyboardInterrupt:
        return _say(args, f"interrupted{args.after}", 130)
    except _Terminated:
        return _say(args, f"terminated{args.after}", 143)
    except BrokenPipeError:  # the reader of our output went away: `plora plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            return _say(args, f"{error.filename or 'output'}: {error.strerror}{args.after}", 1)
        raise
    except ValueError as error:
        from planner import PlanError

        if isinstance(error, PlanError):
            return _say(args, str(error), 2)
        raise


def _say(args: argparse.Namespace, message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"plora {args.command}: {message}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise on Ctrl-C and SIGTERM, again every second until the block is left: hooks that JAX runs may swallow one."""
    kinds = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: _Terminated}
    asked: list[int] = []

    def handler(number: int, _: Any) -> None:
        if number in kinds:
            asked.append(number)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        raise kinds[signal.Signals(asked[-1])]

    if threading.current_thread() is not threading.main_thread():  # signals are the caller's
        yield
        return
    ignored = [
        number for number in kinds if signal.getsignal(number) is signal.SIG_IGN
    ]  # as in the background
    numbers = [number for number in (*kinds, signal.SIGALRM) if number not in ignored]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            signal.signal(number, old)


def command() -> NoReturn:
    """Run `main` as a process: after an interruption leave at once, since a step in flight would end in an abort."""
    code = main()
    if code in (130, 143):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _port(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 0 to 65535")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _target(text: str) -> Path:
    import tempfile

    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory; name a file")
    if path.exists() and not path.is_file():  # a pipe or a device
        return path
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # a file without a name: nothing is left
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: {path.parent}: {error.strerror}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="plora", description="Train many LoRA configurations at once on one frozen base model."
    )
    parser.add_argument("--version", action="version", version=f"plora_jax {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, doc: str, after: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=doc, description=doc)
        sub.set_defaults(run=run, after=after)
        return sub

    sub = command("quickstart", _quickstart, "Run a complete sweep on a small real model, on the CPU.")
    sub.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="run directory (default: runs/quickstart, or the next free -N)",
    )

    sub = command(
        "plan",
        _plan,
        "Plan a sweep: which jobs share a device, when, and in how much memory. Needs no accelerator; "
        "`sweep --dry-run` also checks every row. Of several sweeps, each of its own model, each gets devices of its "
        "own, so that the last ends as early as possible.",
    )
    sub.add_argument("sweep", type=Path, nargs="+", metavar="SWEEP.yaml")
    sub.add_argument(
        "--devices",
        help="such as 8xA100-40GB, 4xA100-40GB+4xH200, or cpu (default: the sweep's, else this machine)",
    )
    sub.add_argument("--json", type=_target, metavar="FILE", help="write the plan as JSON")
    sub.add_argument("--svg", type=_target, metavar="FILE", help="draw the plan in time, device by device")
    sub.add_argument("--explain", action="store_true", help="say what limits each pack, and why these slots")
    sub.add_argument(
        "--cost-model",
        type=Path,
        action="append",
        metavar="FILE",
        help="measured times and memory to plan with; may be repeated, one for each type of devices and model",
    )
    sub.add_argument("--rows", type=_count, metavar="N", help="training rows, when the data is not at hand")

    sub = command(
        "sweep",
        _sweep,
        "Plan, train, evaluate, rank and export every job of a sweep.",
        "; add --resume to go on",
    )
    sub.add_argument("sweep", type=Path, metavar="SWEEP.yaml")
    sub.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory (default: runs/NAME of NAME.yaml)"
    )
    sub.add_argument(
        "--resume", action="store_true", help="go on with the run in --out; starts it when absent"
    )
    sub.add_argument("--dry-run", action="store_true", help="check everything, show the plan, and stop")

    sub.add_argument(
        "--launcher",
        choices=["local", "ray", "slurm", "inline"],
        help="where workers run: processes here (default), a cluster, or this process itself (default on one CPU)",
    )
    sub.add_argument(
        "--workers", type=_count, metavar="N", help="workers (default: one for each GPU; one on a CPU)"
    )
    sub.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a Ray cluster (default: $RAY_ADDRESS, else a local one)"
    )
    sub.add_argument(
        "--slurm", metavar="OPTIONS", help="options of sbatch, as in --slurm='--partition=gpu --time=4:00:00'"
    )
    sub.add_argument(
        "--reproducible",
        action=argparse.BooleanOptionalAction,
        help="decide by step counts and scores alone, so that interruptions change no bit (default: on a CPU)",
    )
    sub.add_argument(
        "--checkpoint-every",
        type=_seconds,
        default=120,
        metavar="S",
        help="seconds between checkpoints (default: 120)",
    )

    sub = command("add", _add, "Add jobs to a sweep, also while it runs.")
    sub.add_argument("directory", type=Path, metavar="RUN", help="run directory")
    sub.add_argument(
        "jobs", type=Path, metavar="JOBS.yaml", help="with search, train or jobs, as in SWEEP.yaml"
    )

    sub = command("stop", _stop, "Withdraw a job from a sweep; if it is running, its best adapter is kept.")
    sub.add_argument("directory", type=Path, metavar="RUN", help="run directory")
    sub.add_argument("job", metavar="JOB", help="job id, or the beginning of one")

    base: dict[str, Any] = {
        "choices": ["auto", "fp32", "bf16", "fp8"],
        "default": "auto",
        "help": "precision of the frozen weights (default: fp32 on a CPU, bf16 on a GPU)",
    }
    sub = command("eval", _eval, "Score a model, and adapters on it, on held-out rows.")
    sub.add_argument("--model", required=True, help="hub id, local directory, or .gguf file")
    sub.add_argument(
        "--adapter",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="PEFT adapter; may be repeated",
    )
    sub.add_argument("--data", required=True, metavar="FILE", help="rows to score on")
    sub.add_argument(
        "--metric",
        default="loss",
        help="loss, choice_accuracy, exact_match, or module:function (default: loss)",
    )
    sub.add_argument(
        "--answer",
        default="whole",
        metavar="HOW",
        help="where exact_match finds the answer: whole, last_number, after:TEXT or regex:PATTERN (default: whole)",
    )
    sub.add_argument(
        "--max-new-tokens",
        type=_count,
        default=64,
        metavar="N",
        help="longest generated answer in tokens (default: 64)",
    )
    sub.add_argument(
        "--max-length", type=_count, default=1024, metavar="N", help="longest row in tokens (default: 1024)"
    )
    sub.add_argument("--base", **base)
    sub.add_argument(
        "--json", type=_target, metavar="FILE", help="write one row for the base and one for each adapter"
    )

    sub = command("report", _report, "Write RUN/report.html, one page that opens offline; or serve it live.")
    sub.add_argument("directory", type=Path, metavar="RUN", help="run directory of plora sweep")
    sub.add_argument(
        "--serve", action="store_true", help="serve the page, kept up to date, and write no file"
    )
    sub.add_argument(
        "--port", type=_port, metavar="N", help="port to serve at (default: 8420; 0: a free one)"
    )
    sub.add_argument(
        "--host", metavar="ADDRESS", help="address to serve at (default: 127.0.0.1, this machine alone)"
    )

    sub = command("watch", _watch, "Show in the terminal how a run stands, until it ends.")
    sub.add_argument("directory", type=Path, metavar="RUN", help="run directory of plora sweep")
    sub.add_argument("--once", action="store_true", help="print how it stands now, and stop")

    sub = command("merge", _merge, "Merge an adapter into its base model and write a Hugging Face model.")
    sub.add_argument("adapter", type=Path, metavar="ADAPTER", help="PEFT adapter directory")
    sub.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new directory for the merged model"
    )
    sub.add_argument("--model", help="base model (default: the one named by the adapter)")
    sub.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "fp32", "bf16", "fp16"],
        help="of the merged weights (default: the base's own; fp32 from .gguf)",
    )

    sub = command(
        "bench",
        _bench,
        "Time the packed step of a model, or the products of a layer, with random weights here.",
    )
    sub.add_argument(
        "what",
        choices=["step", "kernels"],
        help="step: the whole step; kernels: one layer's products with adapters, and which implementation serves each",
    )
    sub.add_argument(
        "--model", required=True, help="hub id of a known model, or a directory with config.json"
    )
    for flag, default, doc in (
        ("--jobs", 8, "jobs in the pack"),
        ("--batch", 1, "sequences of each job in a step"),
        ("--length", 1024, "tokens of a sequence"),
        ("--rank", 32, "rank of every adapter"),
    ):
        sub.add_argument(flag, type=_count, default=default, metavar="N", help=f"{doc} (default: {default})")
    sub.add_argument(
        "--recompute",
        choices=["auto", "none", "dots", "layer", "offload"],
        default="none",
        help="what a step's backward pass recomputes; offload: as layer, its inputs kept on the host; "
        "auto: the least that fits the GPU (default: none)",
    )
    sub.add_argument(
        "--optimizer",
        choices=["adamw", "adamw_bf16", "sgd"],
        default="adamw",
        help="of every job (default: adamw)",
    )
    sub.add_argument("--base", "--precision", **base)
    sub.add_argument(
        "--compare",
        choices=["peft"],
        help="of a step: also time PEFT and PyTorch on the same shapes, one job after another",
    )
    sub.add_argument(
        "--kernels",
        choices=["xla", "auto", "hopper"],
        help="adapters by XLA, by the fused kernel where it should pay, or wherever it serves (default: as training)",
    )
    sub.add_argument("--json", type=_target, metavar="FILE", help="write the measurement as JSON")

    sub = command(
        "profile", _profile, "Measure the packed step here and write the cost model that plan reads."
    )
    sub.add_argument(
        "--model", required=True, help="hub id of a known model, or a directory with config.json"
    )
    sub.add_argument(
        "--length", type=_count, default=1024, metavar="N", help="longest length (default: 1024)"
    )
    sub.add_argument(
        "--recompute", choices=["none", "dots", "layer"], default="none", help="what backward recomputes"
    )
    sub.add_argument("--base", "--precision", **base)
    sub.add_argument("--json", type=_target, required=True, metavar="FILE", help="cost model to write")

    sub = command("doctor", _doctor, "Show what was found on this machine and what is missing.")
    sub.add_argument("--model", help="also describe this model: what would be trained, what is unsupported")
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("plora-jax")
    except PackageNotFoundError:
        return "(not installed)"


def _quickstart(args: argparse.Namespace) -> int:
    from plora_jax.quickstart import main as quickstart
    from plora_jax.quickstart import unused

    out = args.out or unused(Path("runs/quickstart"))
    fresh = not out.exists()
    try:
        return quickstart(out)
    finally:
        if fresh and (out / "sweep.yaml").exists():
            args.after = f"; go on with: plora sweep {out}/sweep.yaml --out {out} --resume"


def _plan(args: argparse.Namespace) -> int:
    written = [path.resolve() for path in (args.json, args.svg) if path is not None]
    if len({*written, *(path.resolve() for path in args.sweep)}) < len(written) + len(args.sweep):
        raise UserError("a file is named twice, among the sweeps and what --json and --svg write")
    if len(args.sweep) > 1:
        from plora_jax.several import several_command

        return several_command([_read(path) for path in args.sweep], args)
    from plora_jax.planning import plan_command

    return plan_command(*_read(args.sweep[0]), args)


def _sweep(args: argparse.Namespace) -> int:
    sweep, jobs = _read(args.sweep)
    from plora_jax.engine.driver import run_sweep

    out = args.out or Path("runs") / args.sweep.stem
    launch = None
    for flag, value, needed in (
        ("--ray-address", args.ray_address, "ray"),
        ("--slurm", args.slurm, "slurm"),
    ):
        if value is not None and args.launcher != needed:
            raise UserError(f"{flag} {value}: has no effect without --launcher {needed}")
    if args.launcher or args.workers:
        from plora_jax.launch.site import LaunchOptions

        launch = LaunchOptions(
            args.launcher or "local", args.workers, args.ray_address or "", args.slurm or ""
        )
    return run_sweep(
        sweep,
        jobs,
        out,
        resume=args.resume,
        dry_run=args.dry_run,
        launch=launch,
        reproducible=args.reproducible,
        checkpoint_s=args.checkpoint_every,
    )


def _add(args: argparse.Namespace) -> int:
    from plora_jax.engine.control import add_jobs

    return add_jobs(args.directory, args.jobs)


def _stop(args: argparse.Namespace) -> int:
    from plora_jax.engine.control import stop_job

    return stop_job(args.directory, args.job)


def _read(path: Path) -> "tuple[Sweep, list[Job]]":
    from plora_jax.config.sweep import load_sweep
    from plora_jax.search.configurations import search_jobs

    sweep = load_sweep(path)
    return sweep, search_jobs(sweep, lambda text: print(f"note: {text}"))


def _eval(args: argparse.Namespace) -> int:
    for adapter in args.adapter:
        if not (adapter / "adapter_config.json").is_file():
            raise UserError(
                f"--adapter {adapter}: no adapter_config.json there; give a PEFT adapter directory"
            )
    from plora_jax.evaluation.scorer import eval_command

    return eval_command(
        args.model,
        args.adapter,
        args.data,
        args.metric,
        args.json,
        max_length=args.max_length,
        answer=args.answer,
        max_new_tokens=args.max_new_tokens,
        precision=args.base,
    )


def _report(args: argparse.Namespace) -> int:
    if args.serve:
        from plora_jax.report.serve import serve

        return serve(args.directory, args.host or "127.0.0.1", 8420 if args.port is None else args.port)
    if args.port is not None or args.host:
        raise UserError("--port and --host say where to serve; add --serve")
    from plora_jax.report.write import write_report

    print(f"report: {write_report(args.directory)}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    from plora_jax.report.watch import watch

    return watch(args.directory, args.once)


def _merge(args: argparse.Namespace) -> int:
    from plora_jax.merge import merge_command

    return merge_command(args.adapter, args.out, args.model, args.dtype)


def _bench(args: argparse.Namespace) -> int:
    from plora_jax.bench import on_this_device
    from plora_jax.bench.kernels import bench_kernels_command
    from plora_jax.bench.step import bench_step_command

    if args.what == "kernels" and args.compare:
        raise UserError("--compare peft times whole steps: plora bench step")
    if args.compare and args.optimizer == "sgd":
        raise UserError("--compare peft: PEFT is timed with AdamW; leave out --optimizer sgd")
    case = {"jobs": args.jobs, "m": args.batch, "length": args.length, "rank": args.rank}
    run = bench_kernels_command
    if args.what == "step":
        case |= {"recompute": args.recompute, "optimizer": args.optimizer, "compare": args.compare}
        run = bench_step_command
    with on_this_device(args.kernels):
        return run(args.model, args.json, args.base, args.kernels, **case)


def _profile(args: argparse.Namespace) -> int:
    from plora_jax.bench.profile import profile_command

    return profile_command(args.model, args.length, args.recompute, args.base, args.json)


def _doctor(args: argparse.Namespace) -> int:
    from plora_jax.doctor import doctor

    return doctor(args.model)


if __name__ == "__main__":
    command()
