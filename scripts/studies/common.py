"""What the studies share: ordinary sweeps in one process, with the base loaded once, and a result kept part by part."""

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

# The sweeps run in this process, whose share of a GPU is then what a worker of its own would take.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
from rich.console import Console

from plora_jax.config.sweep import load_sweep
from plora_jax.engine.driver import run_sweep
from plora_jax.engine.rundir import write_atomic, write_json
from plora_jax.machine import cores, versions
from plora_jax.models.load import Base, load_base
from plora_jax.search.configurations import search_jobs
from plora_jax.training.compiled import keep_programs

CHECKPOINT_S = 3600.0  # no sweep of a study is worth going on with
EXPORT = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct"}


@dataclass(frozen=True)
class Finished:
    """Hold a sweep that ended: its directory, leaderboard and wall seconds, and what was compiled meanwhile."""

    path: Path
    board: dict[str, Any]
    seconds: float
    programs: int
    compile_s: float

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """Return the rows of the leaderboard, best first."""
        return self.board["jobs"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl of one kind."""
        lines = (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


class Study:
    """Run a study's parts while there is time, and write its result after each.

    Args:
      args: of `parser`. load: makes the base model; by default the GGUF or directory `args.model`.
    """

    def __init__(self, args: argparse.Namespace, load: Callable[[str], Base] = load_base) -> None:
        self.args, self.began = args, time.monotonic()
        self.compiled: list[tuple[str, float]] = []  # programs and seconds
        keep_programs()
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.base = load(str(args.model))
        device = jax.devices()[0]
        settings = {
            name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()
        }
        self.result: dict[str, Any] = {
            "settings": settings,
            "machine": {
                "device": device.device_kind,
                "precision": str(jax.tree.leaves(self.base.params)[0].dtype),
                "processor": platform.machine(),
                "cores": cores(),
                "versions": versions(),
            },
            "load_s": round(self.elapsed, 1),
            "left_out": [],
            "failed": {},
        }

    @property
    def elapsed(self) -> float:
        """Return the seconds since the study began."""
        return time.monotonic() - self.began

    def _listen(self, event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            self.compiled.append((fun_name, seconds))

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Do one part and write the result down, or how it failed; once `--seconds` are over, only name it."""
        if self.elapsed >= self.args.seconds:
            self.result["left_out"].append(name)
        else:
            print(f"{self.elapsed:6.1f} s  {name}", flush=True)
            try:
                work()
            except Exception as error:  # the parts that do not need this one go on
                traceback.print_exc()
                self.result["failed"][name] = f"{type(error).__name__}: {error}"
        self.result["seconds"] = round(self.elapsed, 1)
        write_json(self.args.out, self.result)

    def sweep(self, name: str, sections: Mapping[str, Any]) -> Finished:
        """Run a sweep given by the sections of SWEEP.yaml into WORK/name; what it prints goes to WORK/name.log.

        Raises:
          UserError: the sweep or WORK/name cannot be used.
          RuntimeError: it ended without a leaderboard, or no job of it was completed.
        """
        out = self.args.work / name
        path, log = out.with_name(f"{out.name}.yaml"), out.with_name(f"{out.name}.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"model": str(self.args.model.absolute()), "export": EXPORT, **sections}
        write_atomic(path, yaml.safe_dump(whole, sort_keys=False))
        sweep, before, began = load_sweep(path), len(self.compiled), time.monotonic()
        with open(log, "w", encoding="utf-8") as file:
            console = Console(file=file, width=160)
            run_sweep(
                sweep,
                search_jobs(sweep),
                out,
                base=self.base,
                checkpoint_s=CHECKPOINT_S,
                console=console,
            )
        seconds = time.monotonic() - began
        gc.collect()  # a pack's arrays are gone before the next sweep makes its own
        made = self.compiled[before:]
        compile_s = sum(seconds for _, seconds in made)
        board = out / "leaderboard.json"
        if not board.exists():
            raise RuntimeError(f"{out}: the sweep did not finish; see {log}")
        found = Finished(out, json.loads(board.read_text(encoding="utf-8")), seconds, len(made), compile_s)
        if found.jobs[0]["status"] == "failed":
            raise RuntimeError(f"{out}: no job was completed; see {log}")
        longest = sorted(made, key=lambda one: -one[1])[:4]
        said = ", ".join(f"{program} {took:.1f} s" for program, took in longest)
        print(f"         {seconds:.1f} s, of it {compile_s:.1f} s compiling {len(made)} programs: {said}")
        return found


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of what every study is told."""
    formatter = partial(argparse.RawDescriptionHelpFormatter, width=100)
    out = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    out.add_argument("--model", type=Path, required=True, metavar="GGUF", help="SmolLM2-135M-Instruct")
    out.add_argument("--work", type=Path, required=True, metavar="DIR", help="new directory of the sweeps")
    out.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the result")
    out.add_argument("--seconds", type=float, default=float("inf"), help="begin no part after so long")
    return out


def table(rows: list[list[str]]) -> str:
    """Lay out rows of text, the first of them headings; all but the first column are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def finish(study: Study, text: str) -> int:
    """Print a study's table and what is not in it, and return the exit code: 1 if something is missing."""
    print(text)
    if left := study.result["left_out"]:
        print(f"left out after {study.args.seconds:g} s: {', '.join(left)}", file=sys.stderr)
    for name, cause in study.result["failed"].items():
        print(f"{name} failed: {cause}", file=sys.stderr)
    return int(bool(left or study.result["failed"]))
