"""Tiny checkpoints for the tests: config.json and the weights of tests/models/seeded.py, on disk."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from plora_jax.models.config import ModelConfig, config_from_hf
from plora_jax.models.decoder import Adapters, LoRA
from plora_jax.models.table import checkpoint_table
from tests.models.seeded import seeded

LLAMA = {
    "model_type": "llama",
    "vocab_size": 56,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Make every tensor of the checkpoint, float32."""
    mean = 1.0 - config.norm_offset
    return {key: seeded(key, tensor.shape, mean) for key, tensor in checkpoint_table(config).items()}


def write(directory: Path, config: dict[str, Any], dtype: Any = np.float32) -> ModelConfig:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    read = config_from_hf(config)
    tensors = {key: np.ascontiguousarray(value.astype(dtype)) for key, value in weights(read).items()}
    save_file(tensors, directory / "model.safetensors")
    return read


def adapters(
    config: ModelConfig, rank: int, scale: float, dtype: Any = jnp.float32, name: str = ""
) -> Adapters:
    """Make an adapter on every site, of one job, from the names that PEFT gives its tensors and `name`."""
    made: Adapters = {}
    for site in config.sites:
        paths = [config.module_path(site, layer) for layer in range(config.n_layers)]
        a = np.stack([seeded(f"{name}{path}.lora_A.weight", (rank, site.d_in)) for path in paths])
        b = np.stack([seeded(f"{name}{path}.lora_B.weight", (site.d_out, rank)) for path in paths])
        scales = jnp.full(config.n_layers, scale, jnp.float32)
        made[site.name] = LoRA(jnp.asarray(a, dtype), jnp.asarray(b, dtype), scales)
    return made
