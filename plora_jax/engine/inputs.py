"""Name the files that a run's results depend on besides its data by their content, so that a changed one is seen."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from plora_jax.config.sweep import Sweep
from plora_jax.jobs import Job
from plora_jax.models.find import HUB_FILES, hub_snapshot

WHOLE = 1 << 24  # bytes; a larger file is sampled, so that 15 GB of weights take a moment
BLOCK, BLOCKS = 1 << 16, 256


def input_digests(sweep: Sweep, jobs: Iterable[Job]) -> dict[str, str]:
    """Return the size and digest of each file of the base model and of the adapters that jobs start from.

    A model that is given in memory alone has no files and is not named.
    """
    files = {f"model {path.name}": path for path in _model_files(sweep.model)}
    for name in sorted({job.init_adapter for job in jobs if job.init_adapter}):
        adapter = sweep.path(name)
        files |= {f"{name}/{path.name}": path for path in sorted(adapter.glob("adapter_*")) if path.is_file()}
    return {name: file_digest(path) for name, path in files.items()}


def file_digest(path: Path) -> str:
    """Return a file's size and digest: of all its bytes, or of its head and of blocks spread evenly up to its end.

    Training changes all weights of a model, so that samples tell it; they would not tell a few changed bytes.
    """
    size, sha = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        sha.update(file.read(WHOLE if size <= WHOLE else BLOCK * 16))
        for i in range(BLOCKS if size > WHOLE else 0):
            file.seek((size - BLOCK) * (i + 1) // BLOCKS)
            sha.update(file.read(BLOCK))
    return f"{size} bytes, {sha.hexdigest()[:16]}"


def _model_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return [path] if path.exists() else []
    if not path.is_dir():
        if name.count("/") != 1:
            return []
        path = hub_snapshot(name, HUB_FILES)
    index = path / "model.safetensors.index.json"
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
    ):  # one file; a broken index is the loader's to tell
        shards = ["model.safetensors"]
    return [path / name for name in ("config.json", *shards) if (path / name).exists()]
