"""The oracle's models and settings as plora_jax sees them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from plora_jax.jobs import JOB_FIELDS, Job
from plora_jax.models.load import Base, load_base
from tests.goldens import peft_recipe as recipe

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


def base_of(directory: Path, family: str) -> Base:
    """Load the recipe's checkpoint in float32."""
    return load_base(str(write_model(directory, family)))


def probe_logits(base: Base, adapters: Any = None) -> np.ndarray:
    """Return float32 logits at the recipe's probe tokens."""
    tokens = recipe.probe()
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    rows = np.broadcast_to(np.arange(tokens.shape[0], dtype=np.int32)[:, None], tokens.shape)
    model = base.model()
    return np.asarray(model.logits(model.hidden(tokens, positions, rows, adapters)))
