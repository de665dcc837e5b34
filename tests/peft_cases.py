"""The oracle's models and settings as plora_jax sees them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from plora_jax.adapters import Adapter
from plora_jax.jobs import JOB_FIELDS, Job
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base, load_base
from plora_jax.training.batch import Batch
from plora_jax.training.step import (
    PackState,
    empty_pack,
    fresh_slot,
    make_load_slot,
    make_train_step,
    pack_spec,
    weight_dtype,
)
from tests.goldens import peft_recipe as recipe

Rows = list[tuple[np.ndarray, np.ndarray]]  # (tokens, whether each token is a label)
GOLDENS = Path(__file__).parent / "goldens"


def job_of(name: str) -> Job:
    """Return a setting of the recipe as a job."""
    setting: dict[str, Any] = recipe.DEFAULTS | recipe.SETTINGS[name] | {"max_steps": recipe.STEPS}
    for field in ("rank_pattern", "alpha_pattern"):
        setting[field] = tuple(setting.get(field, {}).items())
    setting["targets"] = tuple(setting.get("targets", recipe.SITES))
    return Job(**{key: value for key, value in setting.items() if key in JOB_FIELDS})


def write_model(directory: Path, family: str) -> Path:
    """Write the recipe's checkpoint as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(recipe.MODELS[family]))
    save_file(recipe.weights(recipe.MODELS[family]), directory / "model.safetensors", {"format": "pt"})
    return directory


def base_of(directory: Path, family: str, dtype: Any = np.float32) -> Base:
    """Load the recipe's checkpoint."""
    return load_base(str(write_model(directory, family)), dtype=dtype)


def probe_logits(base: Base, adapters: Any = None) -> np.ndarray:
    """Return float32 logits at the recipe's probe tokens."""
    tokens = recipe.probe()
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    rows = np.broadcast_to(np.arange(tokens.shape[0], dtype=np.int32)[:, None], tokens.shape)
    model = base.model()
    return np.asarray(model.logits(model.hidden(tokens, positions, rows, adapters)))


def micro_batch(rows: list[Rows | None], close: list[bool], first: int) -> Batch:
    """Lay the slots' rows (None: the slot idles), from number `first` of the data on, into one micro-batch."""
    m = max(len(slot) for slot in rows if slot)
    J, S = len(rows), recipe.LENGTH
    tokens, ids = np.zeros((J, m, S), np.int32), np.full((J, m, S), -1, np.int32)
    trained, targets = np.zeros((J, m, S), np.int32), np.full((J, m, S), -1, np.int32)
    for j, slot in enumerate(rows):
        for i, (row, mask) in enumerate(slot or ()):
            tokens[j, i, : len(row)], ids[j, i, : len(row)] = row, first + i
            at = np.flatnonzero(mask[1:])
            trained[j, i, : len(at)], targets[j, i, : len(at)] = at, row[at + 1]
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (J, m, S))
    active = np.array([slot is not None for slot in rows])
    return Batch(tokens, positions, ids, trained, targets, np.zeros(J, np.int32), np.array(close), active)


def run_pack(
    base: Base,
    jobs: list[Job],
    rows: list[Rows],
    m: int,
    starts: list[Adapter],
    runtime: Runtime | None = None,
) -> tuple[PackState, list[dict[str, list[Any]]]]:
    """Train jobs on their rows in one pack, m rows a slot and micro-step; return the end and what each recorded."""
    spec = pack_spec(base.config, jobs)
    load, state = make_load_slot(spec), empty_pack(base.config, spec, weight_dtype(base))
    for slot, (job, start) in enumerate(zip(jobs, starts, strict=True)):
        state = load(state, slot, *fresh_slot(base.config, spec, job, recipe.STEPS, start))
    step = make_train_step(base, spec, runtime)
    records: list[dict[str, list[Any]]] = [{} for _ in jobs]
    for micro in range(max(len(r) for r in rows) // m):
        part = [r[micro * m : (micro + 1) * m] or None for r in rows]
        close = [(micro + 1) * m % job.batch_size == 0 for job in jobs]
        batch = micro_batch(part, close, micro * m)
        state, metrics = step(state, base.params, batch)
        values = {field: np.asarray(value) for field, value in metrics._asdict().items()}
        for slot in np.flatnonzero(values["closed"]):
            for field, value in values.items():
                records[slot].setdefault(field, []).append(value[slot].item())
    return state, records
