"""Find a model's configuration and tokenizer: a directory, .gguf file, preset or hub id. Imports no JAX."""

import os
from pathlib import Path
from typing import Any

from plora_jax.errors import UserError
from plora_jax.hub import why_unreachable
from plora_jax.models import gguf
from plora_jax.models.checkpoint import read_json
from plora_jax.models.config import ModelConfig, config_from_hf
from plora_jax.models.gguf_tokenizer import tokenizer_from_gguf
from plora_jax.models.presets import PRESETS, preset

# transformers, which is imported where it is used, warns that PyTorch is missing; nothing here needs it
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
SMALL_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]
# Mistral's repositories hold the weights once more, as consolidated.safetensors.
HUB_FILES = [*SMALL_FILES, "model*.safetensors"]


def load_config(name: str) -> ModelConfig:
    """Read what a model is, without weights: from a directory, a .gguf file, a preset, or the hub.

    Raises:
        UserError: the model is not supported, not found, or unreachable.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return gguf.open_gguf(path).config
    if path.is_dir():
        return config_from_hf(read_json(path / "config.json"), str(path / "config.json"))
    if name in PRESETS:
        return preset(name)
    found = hub_snapshot(name, ["config.json"]) / "config.json"
    return config_from_hf(read_json(found), f"{name}/config.json")


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer, with its chat template.

    Raises:
        UserError: there is none, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(gguf.open_gguf(path).fields, str(path))
    path = path if path.is_dir() else hub_snapshot(name, SMALL_FILES)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, use_fast=True)
    except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{name}: no tokenizer could be loaded: {reason}") from None


def stop_ids(name: str) -> tuple[int, ...]:
    """Return the ids that end a model's answers by its config.json and generation_config.json, where it has them."""
    path = Path(name).expanduser()
    if not path.is_dir():
        try:
            path = hub_snapshot(name, SMALL_FILES)
        except UserError:  # a .gguf file, or a model made in Python: its tokenizer knows its EOS
            return ()
    found: list[int] = []
    for file in ("config.json", "generation_config.json"):
        ids = read_json(path / file).get("eos_token_id") if (path / file).is_file() else None
        found += [ids] if isinstance(ids, int) else ids or []
    return tuple(dict.fromkeys(found))


def hub_snapshot(name: str, patterns: list[str]) -> Path:
    """Return a directory with the matching files of a hub model, from the cache or the hub; or UserError."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"model {name!r}: no such directory or .gguf file, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    offline = why_unreachable()
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=bool(offline)))
    except Exception as error:  # the hub client raises a dozen unrelated types: http, offline, gated, absent
        reason = offline or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"model {name!r}: not a local directory, and the hub cannot give it ({reason}); "
            "give a directory with config.json and safetensors, or a .gguf file"
        ) from None
