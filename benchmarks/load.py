"""Measure how a model is loaded from disk, how an engine starts on it, and what the engine adds to a step.

    python -m benchmarks.load --model Qwen/Qwen2.5-7B-Instruct --work /tmp/load --out load.jsonl

A sharded checkpoint of the model's shapes with random bf16 weights is written under `--work`; the files are read as
they are, then loaded, each from the disk and from the page cache; a small sweep is run twice, first to compile its
programs and then to find them kept; the last process times the sweep's micro-steps, and the bare step beside them. A
line of JSON is written as each part ends. `--seconds` bounds the call: a part that does not fit is cut off or left out,
and named. `--layers N` makes the model shallower; `--model` may be a directory with a config.json.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SHARDS = 4
BLOCK = 16 * 2**20  # bytes a read
NOISE = 64 * 2**20  # values that the weights repeat
JOBS, RANK, LENGTH, ROWS = 8, 32, 1024, 24
WARM, BARE = 4, 10  # micro-steps that are not counted, and steps of the bare loop
SAMPLE_S = 0.005  # between two looks at the memory of the process
FINISHED = re.compile(
    r"Finished (tracing|jaxpr to MLIR|XLA compilation|loading).*? (\S+) (?:for jit )?in ([\d.e-]+) sec"
)
ROOT = Path(__file__).parent.parent


# --- a checkpoint -------------------------------------------------------------------------------------------------


def settings_of(model: str, layers: int | None) -> dict[str, Any]:
    """Return the config.json of a preset, or of a directory."""
    from plora_jax.models.presets import PRESETS

    path = Path(model) / "config.json"
    found = json.loads(path.read_text()) if path.exists() else dict(PRESETS[model])
    return found | {"torch_dtype": "bfloat16"} | ({"num_hidden_layers": layers} if layers else {})


def noise() -> np.ndarray:
    """Draw bf16 values of N(0, 0.02), as their bits."""
    values = 0.02 * np.random.default_rng(0).standard_normal(NOISE // 2, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def plan_shards(sizes: dict[str, int], count: int) -> list[list[str]]:
    """Share tensors, in order, among shards of about the same bytes."""
    total, before = sum(sizes.values()), 0
    shards: list[list[str]] = [[] for _ in range(count)]
    for key, size in sizes.items():
        shards[min(count * (before + size // 2) // total, count - 1)].append(key)
        before += size
    return [shard for shard in shards if shard]


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], values: np.ndarray) -> None:
    """Write a safetensors file of bf16 tensors: ones for norms, else the values again and again."""
    header, at = {}, 0
    for key, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, shape in shapes.items():
            left = int(np.prod(shape))
            source = np.full(left, 0x3F80, np.uint16) if key.endswith("norm.weight") else values
            while left:
                left -= file.write(source[:left].data) // 2  # type: ignore[arg-type]


def write_checkpoint(directory: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Write config.json, tokenizer and sharded weights; return the bytes of each shard."""
    from plora_jax.models.config import config_from_hf
    from plora_jax.models.table import checkpoint_table

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(settings))
    write_tokenizer(directory)
    table = checkpoint_table(config_from_hf(settings, "config.json"))
    last = ("model.norm.weight", "lm_head.weight")  # where transformers writes them
    keys = [*(key for key in table if key not in last), *(key for key in last if key in table)]
    shards = plan_shards({key: 2 * table[key].size for key in keys}, SHARDS)
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    values = noise()
    with ThreadPoolExecutor(SHARDS) as pool:
        written = [
            pool.submit(write_shard, directory / name, {key: table[key].shape for key in shard}, values)
            for name, shard in zip(names, shards, strict=True)
        ]
        for future in written:
            future.result()
    return {name: (directory / name).stat().st_size for name in names}


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of one token a byte, and an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def write_sweep(work: Path, model: Path, length: int) -> Path:
    """Write a sweep of JOBS jobs on rows of exactly `length` tokens, and two rows to score."""
    from plora_jax.config.yamlfile import dump_yaml

    letters = np.random.default_rng(1).integers(ord("a"), ord("z") + 1, (ROWS + 2, length - 1), np.uint8)
    texts = [bytes(row).decode() for row in letters]  # and the end of text makes it `length`
    rows = [json.dumps({"prompt": text[:-8], "completion": text[-8:]}) + "\n" for text in texts]
    (work / "train.jsonl").write_text("".join(rows[:ROWS]))
    (work / "eval.jsonl").write_text("".join(rows[ROWS:]))
    jobs = [{"rank": RANK, "learning_rate": 1e-5 * (1 + n)} for n in range(JOBS)]
    sweep = {
        "model": str(model),
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": length, "metric": "loss"},
        "search": {"jobs": jobs},
        "train": {"batch_size": 1, "epochs": 1},
        "precision": {"base": "bf16"},
    }
    path = work / "sweep.yaml"
    path.write_text(dump_yaml(sweep))
    return path


# --- the disk -----------------------------------------------------------------------------------------------------


def drop_cache(files: list[Path]) -> str:
    """Have the kernel forget the files' pages; say how that was asked."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        for path in files:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "fadvise"


def read_raw(files: list[Path]) -> float:
    """Read files one after another, a block at a time; return the seconds."""
    block, began = bytearray(BLOCK), time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - began


# --- one process that loads ---------------------------------------------------------------------------------------


class Memory(threading.Thread):
    """Sample what this process holds in RAM: all of it (files' pages too), and what is no file's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.look()
        self.peak, self.over = dict(self.first), threading.Event()

    @staticmethod
    def look() -> dict[str, int]:
        with open("/proc/self/status") as file:
            found = dict(line.split(":", 1) for line in file)
        return {
            name: int(found[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")
        }

    def run(self) -> None:
        while not self.over.wait(SAMPLE_S):
            self.add()

    def add(self) -> None:
        self.peak = {name: max(self.peak[name], value) for name, value in self.look().items()}

    def stop(self) -> dict[str, dict[str, int]]:
        """Return bytes before and at the peak."""
        self.over.set()
        self.join()
        self.add()
        return {"before": self.first, "peak": self.peak}


def load(model: str, readers: int | None) -> dict[str, Any]:
    """Load a base model as a worker does, or with so many readers, and say what it took."""
    began = time.perf_counter()
    import jax

    import plora_jax.models.load as loader
    from plora_jax.models.find import load_tokenizer
    from plora_jax.training.compiled import keep_programs

    loader.READERS = readers or loader.READERS

    keep_programs()
    imported = time.perf_counter()
    load_tokenizer(model)  # imports transformers; the second time it takes little of the time below
    tokenized = time.perf_counter()
    compiled: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":  # or finding it kept
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    device = jax.devices()[0]
    jax.block_until_ready(jax.numpy.zeros(1))
    compiled.clear()
    started, memory = time.perf_counter(), Memory()
    memory.start()
    base = loader.load_base(model, precision="bf16")
    jax.block_until_ready(jax.tree.leaves(base.params))
    seconds = time.perf_counter() - started
    found = {
        "import_s": imported - began,
        "tokenizer_s": tokenized - imported,
        "device_s": started - tokenized,
        "load_s": seconds,
        "compile_s": sum(compiled),
        "programs": len(compiled),
        "host": memory.stop(),
        "device": device.device_kind,
        "device_bytes": (device.memory_stats() or {}).get("bytes_in_use"),
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(base.params)),
    }
    last = base.params["layers"]["q_proj"]["w"][...][-1]
    return found | {"q_proj_std": float(last.astype("float32").std())}


# --- one process that times micro-steps ---------------------------------------------------------------------------


def micro_steps(path: Path, out: Path) -> dict[str, Any]:
    """Run the sweep in this process; time its micro-steps, then the bare step, dispatched again and again."""
    import jax

    from plora_jax.config.sweep import load_sweep
    from plora_jax.engine.driver import run_sweep
    from plora_jax.engine.packrun import PackRun
    from plora_jax.launch.site import LaunchOptions
    from plora_jax.search.configurations import search_jobs
    from plora_jax.training.trainer import Trainer

    ends: list[float] = []
    engine: list[float] = []
    waits: list[float] = []
    found: dict[str, Any] = {}
    step, read = PackRun._micro_step, Trainer._read

    class Enough(BaseException):
        """The rest of the sweep is not wanted."""

    def timed_read(trainer: Trainer, metrics: Any) -> None:
        began = time.perf_counter()
        jax.block_until_ready(metrics)
        waits.append(time.perf_counter() - began)
        read(trainer, metrics)

    def timed_step(run: PackRun) -> None:
        began = time.thread_time()
        step(run)
        engine.append(time.thread_time() - began)
        ends.append(time.perf_counter())
        if len(ends) == ROWS - 1:  # in the last one all jobs are scored and exported
            found.update(slots=run.trainer.spec.slots, policy=run.program.runtime.recompute, bare_s=bare(run))
            raise Enough

    def bare(run: PackRun) -> float:
        run.trainer.sync()
        state, batch = run.trainer.state, next(run.trainer._loader)
        began = time.perf_counter()
        for _ in range(BARE):
            state, metrics = run.trainer._step(state, run.trainer.base.params, batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / BARE

    setattr(PackRun, "_micro_step", timed_step)  # noqa: B010
    setattr(Trainer, "_read", timed_read)  # noqa: B010
    sweep = load_sweep(path)
    with contextlib.suppress(Enough):
        run_sweep(sweep, search_jobs(sweep), out, launch=LaunchOptions("inline"))
    return found | pace(ends, engine, waits, found["bare_s"])


def pace(ends: list[float], engine: list[float], waits: list[float], bare_s: float) -> dict[str, Any]:
    """Compare micro-steps, from when each ended and what the host's thread did and waited, with the bare step."""
    steps = [after - before for before, after in pairwise(ends)][WARM:]
    mean = statistics.fmean(steps)
    return {
        "micro_steps": len(steps),
        "step_s": mean,
        "median_s": statistics.median(steps),
        "overhead": mean / bare_s - 1,
        "engine_s": statistics.fmean(engine[WARM:]),  # processor time of the thread, hidden or not
        "engine_share": statistics.fmean(engine[WARM:]) / bare_s,
        "least_wait_s": min(waits[WARM:]),  # above 0: the device was never out of work
    }


# --- a sweep as a user runs it ------------------------------------------------------------------------------------


def start_of(run: Path, called: float) -> dict[str, Any]:
    """Split the start of a run's first pack, from the run's events; `called` is when the command was."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]

    def first(kind: str) -> dict[str, Any]:
        return next(event for event in events if event["event"] == kind)

    started, loaded, compiled = first("started"), first("loaded"), first("compiled")
    placed = [event["time"] for event in events if event["event"] == "placed"]
    placed = [at for at in placed if at <= compiled["time"]]
    worker = json.loads((run / "workers" / "0.json").read_text())
    return {
        "driver_s": started["time"] - called,  # imports, rows, plan
        "start_s": compiled["time"] - started["time"],  # of the worker, to its first micro-step
        "import_s": loaded["time"] - loaded["load_s"] - loaded["ahead_s"] - started["time"],
        "load_s": loaded["load_s"],
        "rows_s": loaded["ahead_s"] + placed[0] - loaded["time"],  # taken over, and the first slot filled
        "slots_s": placed[-1] - placed[0],
        "step_s": compiled["time"] - placed[-1],  # compiled, or found
        "compile_s": compiled["compile_s"],
        "whole_s": events[-1]["time"] - started["time"],
        "slots": compiled["slots"],
        "micro_step_ms": worker.get("step_ms"),
        "tokens_per_s": worker.get("tokens_per_s"),
    }


def compiled_in(log: str, last: str = "jit(step)") -> dict[str, Any]:
    """Add up what JAX's log tells of programs, up to the first whose name is `last`; and name the longest."""
    times: dict[str, list[tuple[float, str]]] = {"tracing": [], "jaxpr to MLIR": [], "XLA compilation": []}
    for kind, name, seconds in FINISHED.findall(log):
        kind = "XLA compilation" if kind == "loading" else kind  # of a step that was kept whole
        times[kind].append((float(seconds), name))
        if kind == "XLA compilation" and name == last:
            break
    traced, lowered, compiled = times.values()
    return {
        "programs": len(compiled),
        "traced_s": sum(seconds for seconds, _ in traced),
        "lowered_s": sum(seconds for seconds, _ in lowered),
        "compiled_s": sum(seconds for seconds, _ in compiled),  # or found kept
        "longest": [[name, seconds] for seconds, name in sorted(compiled, reverse=True)[:8]],
    }


# --- the parts, in order ------------------------------------------------------------------------------------------


def child(work: Path, seconds: float, *command: str) -> subprocess.CompletedProcess:
    """Run a part in a process of its own, with programs kept under `work`, as long as there is time."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PLORA_CACHE": str(work / "cache"),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_LOG_COMPILES": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    }
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise RuntimeError(f"{command[0]} ended with code {done.returncode}:\n{tail}")
    return done


def parts(args: argparse.Namespace, work: Path) -> Iterator[tuple[str, Callable[[float], dict[str, Any]]]]:
    """Name the parts; each takes the seconds that are left."""
    model, held = work / "model", {}
    settings = settings_of(args.model, args.layers)

    def files() -> list[Path]:
        return [model / name for name in held["sizes"]]

    def total() -> int:
        return sum(held["sizes"].values())

    def write(_: float) -> dict[str, Any]:
        began = time.perf_counter()
        held["sizes"] = write_checkpoint(model, settings)
        written = time.perf_counter()
        os.sync()
        seconds = time.perf_counter() - began
        rates = {"GB_s": total() / seconds / 1e9, "layers": settings["num_hidden_layers"]}
        return {"write_s": written - began, "synced_s": seconds, "bytes": total(), **rates} | {
            "largest_shard": max(held["sizes"].values())
        }

    def raw(_: float) -> dict[str, Any]:
        how = drop_cache(files())
        held["raw_s"] = seconds = read_raw(files())
        again = read_raw(files()[:1])
        hot = held["sizes"][files()[0].name] / again / 1e9
        return {"dropped": how, "read_s": seconds, "GB_s": total() / seconds / 1e9, "cached_GB_s": hot}

    def loading(cold: bool, *more: str) -> Callable[[float], dict[str, Any]]:
        def run(left: float) -> dict[str, Any]:
            how = drop_cache(files()) if cold else "kept"
            done = child(work, left, "benchmarks.load", "--load", str(model), *more)
            found = json.loads(done.stdout.splitlines()[-1])
            if not 0.019 < found["q_proj_std"] < 0.021:
                raise RuntimeError(f"the weights are not those of the files: {found}")
            host, bound = found["host"], max(held["sizes"].values()) + 2**30
            grown = {name: host["peak"][name] - host["before"][name] for name in host["peak"]}
            return found | {
                "cache": how,
                "GB_s": total() / found["load_s"] / 1e9,
                "of_raw": held["raw_s"] / found["load_s"] if "raw_s" in held else None,
                "grown": grown,
                "peak_of_bound": host["peak"]["VmRSS"] / bound,
                "anonymous_of_bound": host["peak"]["RssAnon"] / bound,
            }

        return run

    def sweep(name: str) -> Callable[[float], dict[str, Any]]:
        def run(left: float) -> dict[str, Any]:
            path, out, called = write_sweep(work, model, args.length), work / name, time.time()
            child(work, left, "plora_jax", "sweep", str(path), "--out", str(out), "--launcher", "local")
            command = time.time() - called
            log = (out / "workers" / "0.log").read_text()
            return {"command_s": command} | start_of(out, called) | compiled_in(log)

        return run

    def overhead(left: float) -> dict[str, Any]:
        path, out = write_sweep(work, model, args.length), work / "third"
        done = child(work, left, "benchmarks.load", "--micro-steps", str(path), "--out", str(out))
        return json.loads(done.stdout.splitlines()[-1])

    yield "write", write
    yield "load, programs new", loading(False)
    yield "raw read", raw
    yield "load, cold", loading(True)
    yield "load, cached", loading(False)
    yield "sweep, programs new", sweep("first")
    yield "sweep, programs kept", sweep("second")
    yield "micro-steps", overhead
    yield "load, cold, one reader", loading(True, "--readers", "1")


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a preset, or a directory with a config.json")
    parser.add_argument("--layers", type=int, metavar="N", help="layers, where not all of them")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens a row (default: {LENGTH})")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="new directory for some 20 GB; removed at the end"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("load.jsonl"), metavar="FILE", help="JSON lines to write"
    )
    parser.add_argument("--seconds", type=float, default=300, help="time for the whole call (default: 300)")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="parts to do, beside the writing of the files"
    )
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--readers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--micro-steps", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, args.readers)))
        return 0
    if args.micro_steps:
        print(json.dumps(micro_steps(args.micro_steps, args.out)), flush=True)
        os._exit(0)  # the sweep was left in the middle
    if not (args.model and args.work):
        parser.error("give --model and --work")
    end, failed, work = time.monotonic() + args.seconds, 0, args.work.resolve()
    work.mkdir(parents=True)
    with open(args.out, "w") as file:
        for name, part in parts(args, work):
            if args.only and name not in ("write", *args.only):
                continue
            left, began = end - time.monotonic(), time.monotonic()
            try:
                row = rounded(part(left)) if left > 0 else {"skipped": "no time left"}
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}"[-1500:]}
            failed += "error" in row or "skipped" in row
            row = {"part": name, "model": args.model, "took_s": round(time.monotonic() - began, 2)} | row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(json.dumps(row), flush=True)
    shutil.rmtree(work)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
