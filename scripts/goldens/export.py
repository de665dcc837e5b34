"""Export adapters and merged models for `scripts.goldens.peft check`, with the logits that JAX computes.

    python -m scripts.goldens.export DIR         # this project's environment
    python -m scripts.goldens.peft check DIR     # an environment with torch, transformers and peft

Every setting of the recipe is exported once with a random B, so that a missing tensor or a wrong scale would show.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from plora_jax import adapters as lora
from plora_jax.jobs import Job
from plora_jax.merge import merge_adapter
from plora_jax.models.config import ModelConfig
from plora_jax.models.decoder import LoRA
from plora_jax.peft import export_adapter
from tests.goldens import peft_recipe as recipe
from tests.peft_cases import base_of, job_of, probe_logits


def random_adapter(config: ModelConfig, job: Job) -> lora.Adapter:
    """Return a fresh adapter with a random B, zero above each layer's own rank."""
    rng, rank = np.random.default_rng(job.rank), lora.ranks(config, job)
    out = {}
    for name, (a, b) in lora.init_adapter(config, job).items():
        own = (np.arange(b.shape[2]) < rank[name][:, None])[:, None]  # [L, 1, R]
        out[name] = lora.Factors(a, jnp.asarray(0.3 * rng.standard_normal(b.shape) * own, jnp.float32))
    return out


def main(directory: Path) -> None:
    """Write every setting's adapter and, for one setting a family, the merged model."""
    logits = {}
    for family in recipe.MODELS:
        base = base_of(directory / f"base_{family}", family)
        names = [name for name, setting in recipe.SETTINGS.items() if setting["model"] == family]
        for name in names:
            job = job_of(name)
            adapter, scales = random_adapter(base.config, job), lora.scales(base.config, job)
            export_adapter(directory / f"{family}-{name}", f"org/{family}", base.config, job, adapter)
            sites = {site: LoRA(f.a, f.b, scales[site]) for site, f in adapter.items()}
            logits[f"{family}-{name}"] = probe_logits(base, sites)
        merged = f"{family}-merged"
        merge_adapter(base.name, directory / f"{family}-{names[0]}", directory / merged, shard_bytes=40_000)
        logits[merged] = logits[f"{family}-{names[0]}"]
    save_file(logits, directory / "logits.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
