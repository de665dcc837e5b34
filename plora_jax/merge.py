"""Merge an adapter into its base model: a Hugging Face directory whose weights are W + scale · B A."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from plora_jax.adapters import Adapter, modules, scales
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.models.checkpoint import Stored, check_tensors, open_directory, read_json
from plora_jax.models.config import ModelConfig, config_from_hf
from plora_jax.models.find import HUB_FILES, hub_snapshot
from plora_jax.models.gguf import open_gguf
from plora_jax.models.gguf_tokenizer import tokenizer_from_gguf
from plora_jax.models.table import checkpoint_table
from plora_jax.peft import import_adapter, read_config, replace_directory, save_tensors

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_INDEX = "model.safetensors.index.json"


def merge_adapter(
    base: str, adapter: str | Path, out: str | Path, *, dtype: str = "auto", shard_bytes: int = 5_000_000_000
) -> Path:
    """Write the base model with the adapter merged in, and return its directory.

    The unquantised weights are read one by one, merged in float32 and rounded once. Heads and embeddings have
    no adapter, so a tied head stays tied. `out` appears by one rename, with config, weights and tokenizer.

    Args:
      base: hub id, Hugging Face directory, or .gguf file (dequantised).
      adapter: PEFT directory.
      out: directory that does not exist yet.
      dtype: auto (the checkpoint's; float32 from .gguf), fp32, bf16 or fp16.
      shard_bytes: largest weights file; more than one are listed in an index.

    Raises:
      UserError: the base or the adapter cannot be loaded or do not fit each other, or the disk is too small.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)}")
    target = Path(out)
    if target.exists():
        raise UserError(f"{target} exists already; give a directory that does not")
    source, config_json, config, stored = _open(base)
    check_tensors(stored, config, base)
    loaded, fields = import_adapter(adapter, config)
    needed = sum(t.size for t in checkpoint_table(config).values()) * 4
    _make(target.parent)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise UserError(f"{target}: up to {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free")

    ready = target.parent / f".{target.name}.tmp"
    shutil.rmtree(ready, ignore_errors=True)  # left by a killed run
    _make(ready)
    try:
        tensors = _merged(config, stored, loaded, Job(**fields), dtype)
        written = _write_shards(ready, tensors, shard_bytes)
        given = {key: value for key, value in config_json.items() if key not in ("torch_dtype", "dtype")}
        (ready / "config.json").write_text(json.dumps(given | {"dtype": written}, indent=2) + "\n")
        _write_rest(ready, source)
        replace_directory(ready, target)
    except BaseException:
        shutil.rmtree(ready, ignore_errors=True)
        raise
    return target


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UserError(f"{directory}: cannot be made: {err.strerror}") from None


def merge_command(adapter: Path, out: Path, model: str | None, dtype: str = "auto") -> int:
    """Run `plora merge`: merge into `model`, or into the base that the adapter names, and say where it is."""
    base = model or read_config(adapter).get("base_model_name_or_path")
    if not base:
        raise UserError(f"{adapter}: the adapter names no base model; give one with --model")
    merge_adapter(base, adapter, out, dtype=dtype)
    print(
        f"{out}: {base} with {adapter} merged in; AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it"
    )
    return 0


def _open(base: str) -> tuple[Path, dict[str, Any], ModelConfig, dict[str, Stored]]:
    path = Path(base).expanduser()
    if path.suffix == ".gguf":
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        file = open_gguf(path)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[file.config.family]
        return path, {"architectures": [kind], **file.config_json}, file.config, file.tensors()
    directory = path if path.is_dir() else hub_snapshot(base, HUB_FILES)
    config_json = read_json(directory / "config.json")
    return directory, config_json, config_from_hf(config_json, base), open_directory(directory)


def _merged(
    config: ModelConfig, stored: dict[str, Stored], adapter: Adapter, job: Job, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of the merged checkpoint, in the order of the table."""
    scale = scales(config, job)
    host = {name: (np.asarray(a), np.asarray(b)) for name, (a, b) in adapter.items()}
    deltas = {
        f"{path}.weight": (site.name, layer)
        for site, layer, path in modules(config)
        if site.name in scale and scale[site.name][layer] != 0
    }
    for key in checkpoint_table(config):
        values = stored[key].read()
        kept = DTYPES.get(dtype, values.dtype)
        if key in deltas:
            name, layer = deltas[key]
            a, b = host[name][0][layer], host[name][1][layer]
            values = values.astype(np.float32) + scale[name][layer] * (b @ a)
        yield key, np.ascontiguousarray(values.astype(kept))


def _write_shards(directory: Path, tensors: Iterator[tuple[str, np.ndarray]], limit: int) -> str:
    """Write tensors to files of at most `limit` bytes (or one tensor), and name the weights' dtype."""
    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total, dtype = 0, ""

    def flush() -> None:
        save_tensors(held, directory / f"shard-{len(shards)}")
        shards.append(list(held))
        held.clear()

    for key, values in tensors:
        if held and sum(v.nbytes for v in held.values()) + values.nbytes > limit:
            flush()
        held[key] = values
        total += values.nbytes
        dtype = values.dtype.name if values.ndim == 2 else dtype
    flush()
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for i, name in enumerate(names):
        (directory / f"shard-{i}").rename(directory / name)
    if len(shards) > 1:
        where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def _write_rest(directory: Path, source: Path) -> None:
    """Copy the tokenizer, chat template and generation settings, or write the .gguf file's tokenizer."""
    for weights in directory.glob("*.safetensors"):  # safetensors makes files that only their owner can read
        shutil.copymode(directory / "config.json", weights)
    if source.suffix == ".gguf":
        tokenizer_from_gguf(open_gguf(source).fields, str(source)).save_pretrained(directory)
        return
    for pattern in HUB_FILES:
        for file in source.glob(pattern):
            if file.suffix != ".safetensors" and file.name not in ("config.json", _INDEX):
                shutil.copyfile(file, directory / file.name)
