"""plora_jax: train many LoRA configurations at once on one frozen base model.

Names are imported on first use, so that planning a sweep never loads JAX.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Job": "jobs",
    "grid": "search.configurations",
    "UserError": "errors",
    "Batch": "training.batch",
    "Base": "models.load",
    "load_base": "models.load",
    "Runtime": "models.decoder",
    "PackSpec": "training.step",
    "PackState": "training.step",
    "pack_spec": "training.step",
    "init_pack": "training.step",
    "make_train_step": "training.step",
    "PackLoader": "data.loader",
    "Slot": "data.layout",
    "choose_shapes": "data.shapes",
    "unstack_adapter": "adapters",
    "read_examples": "data.encode",
    "sweep": "engine.driver",
    "import_adapter": "peft",
    "export_adapter": "peft",
    "merge_adapter": "merge",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plora_jax' has no attribute {name!r}")
    return getattr(import_module(f"plora_jax.{_HOMES[name]}"), name)
