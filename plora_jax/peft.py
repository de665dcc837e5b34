"""Adapters as PEFT directories: exact export, strict import.

A directory holds `adapter_config.json`, `adapter_model.safetensors` and `README.md`, as PEFT 0.21 writes and
reads them. Tensors are `base_model.model.<module path>.lora_A.weight` [r, d_in] and `.lora_B.weight`
[d_out, r].
"""

import json
import math
import os
import re
import reprlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.flax import load_file
from safetensors.numpy import save_file

from plora_jax.adapters import Adapter, Factors, alphas, match_pattern, max_rank, modules, ranks
from plora_jax.engine.faults import fault
from plora_jax.engine.rundir import flush
from plora_jax.errors import UserError
from plora_jax.jobs import JOB_FIELDS, LINEAR, Job
from plora_jax.model_card import model_card
from plora_jax.models.config import ModelConfig

MAX_RANK = JOB_FIELDS["rank"].metadata["high"]
CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"
_PREFIX = "base_model.model."

# adapter_config.json fields that are read here, or do not change what a loaded adapter computes
_KNOWN = """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform
    loftq_config lora_alpha lora_dropout megatron_core peft_type peft_version qalora_group_size r rank_pattern
    revision runtime_config target_modules task_type use_rslora
"""
# these starts leave the base model's weights alone; PiSSA, OLoRA, CorDA, LoftQ … change them when they load
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def _rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _mapping(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        value is None
        or (isinstance(value, dict) and all(_compiles(key) and item(one) for key, one in value.items()))
    )


def _one_or_more(kind: type) -> Callable[[Any], bool]:
    return lambda value: (
        value is None
        or type(value) is kind
        or (isinstance(value, list) and all(type(item) is kind for item in value))
    )


_MODULES = (
    lambda value: _one_or_more(str)(value) and _compiles(value),
    "a regular expression or a list of names",
)
_HOLDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_rank, f"a whole number from 1 to {MAX_RANK}"),
    "lora_alpha": (_alpha, "a number above 0"),
    "rank_pattern": (_mapping(_rank), f"a mapping to whole numbers from 1 to {MAX_RANK}"),
    "alpha_pattern": (_mapping(_alpha), "a mapping to numbers above 0"),
    "target_modules": _MODULES,
    "exclude_modules": _MODULES,
    "layers_to_transform": (_one_or_more(int), "a whole number or a list of them"),
    "layers_pattern": (_one_or_more(str), "text or a list of texts"),
}


def _compiles(value: Any) -> bool:
    try:
        re.compile(value if isinstance(value, str) else "")
    except re.error:
        return False
    return True


def export_adapter(
    directory: str | Path,
    base_name: str,
    config: ModelConfig,
    job: Job,
    adapter: Mapping[str, Factors],
    precision: str = "",
) -> Path:
    """Write one job's adapter so that PEFT loads it strictly, and return its directory.

    `adapter` is at the job's true ranks (`unstack_adapter`). `base_name` becomes `base_model_name_or_path`; the README
    also tells the `precision` of the base.
    All files are written beside the target and appear by one rename; an adapter already there is replaced.
    """
    target = Path(directory)
    ready = target.parent / f".{target.name}.tmp"
    shutil.rmtree(ready, ignore_errors=True)  # left by a killed run
    ready.mkdir(parents=True)
    save_tensors(adapter_tensors(config, job, adapter), ready / WEIGHTS)
    (ready / CONFIG).write_text(json.dumps(adapter_config(base_name, config, job), indent=2) + "\n")
    shutil.copymode(ready / CONFIG, ready / WEIGHTS)  # safetensors makes files that only their owner can read
    (ready / CARD).write_text(model_card(base_name, job, max_rank(config, job), precision))
    for file in ready.iterdir():
        flush(file)
    fault("export-rename")
    replace_directory(ready, target)
    return target


def adapter_tensors(config: ModelConfig, job: Job, adapter: Mapping[str, Factors]) -> dict[str, np.ndarray]:
    """Return PEFT's tensors by key, each module at its own rank; modules without an adapter are absent."""
    rank, out = ranks(config, job), {}
    if set(rank) != set(adapter):
        raise ValueError(f"the job adapts {sorted(rank)}, but the adapter has {sorted(adapter)}")
    host = {name: tuple(np.asarray(matrix, np.float32) for matrix in f) for name, f in adapter.items()}
    for site, layer, path in modules(config):
        if r := int(rank[site.name][layer]) if site.name in rank else 0:
            a, b = host[site.name]
            out[f"{_PREFIX}{path}.lora_A.weight"] = np.ascontiguousarray(a[layer, :r])
            out[f"{_PREFIX}{path}.lora_B.weight"] = np.ascontiguousarray(b[layer, :, :r])
    return out


def adapter_config(base_name: str, config: ModelConfig, job: Job) -> dict[str, Any]:
    """Return the contents of `adapter_config.json` for a job."""
    rank = ranks(config, job)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "inference_mode": True,
        "r": job.rank,
        "lora_alpha": _plain(job.alpha),
        "use_rslora": job.use_rslora,
        "lora_dropout": job.dropout,
        "target_modules": list(_target_names(config, {name: r > 0 for name, r in rank.items()})),
        "rank_pattern": _patterns(config, dict(job.rank_pattern), rank, job.rank),
        "alpha_pattern": _patterns(config, dict(job.alpha_pattern), alphas(config, job), job.alpha),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "use_dora": False,
    }


def import_adapter(directory: str | Path, config: ModelConfig) -> tuple[Adapter, dict[str, Any]]:
    """Read a PEFT LoRA adapter for this model: its matrices, and the job fields that fix its shape and scale.

    The fields (`rank`, `alpha`, `use_rslora`, `targets`, `rank_pattern`, `alpha_pattern`) go into a job with
    `dataclasses.replace(job, **fields)`; where patterns overlap they are rewritten so that PEFT's first match
    holds. Raises `UserError` when a file is missing or unreadable, for a feature that is not plain LoRA
    (DoRA, biases, saved modules, trained embeddings …), for missing or unknown tensors, and for wrong shapes;
    each by name.
    """
    root = Path(directory)
    settings = read_config(root)
    expected = _targeted(settings, [path for _, _, path in modules(config)])
    try:
        tensors = load_file(str(root / WEIGHTS))
    except (SafetensorError, OSError) as err:
        raise UserError(f"{root / WEIGHTS}: cannot be read as safetensors: {err}") from None
    found = _sort_keys(root, config, tensors)
    if expected is None:  # no target_modules in the file: the tensors say it
        expected = found
    _refuse("lacks tensors that its target_modules ask for", root, sorted(expected - found))
    _refuse("has tensors for modules that its target_modules leave out", root, sorted(found - expected))

    masks = {s.name: np.zeros(config.n_layers, bool) for s in config.sites}
    for site, layer, path in modules(config):
        masks[site.name][layer] = path in found
    kept = {}
    for field, default in (("rank_pattern", settings["r"]), ("alpha_pattern", settings["lora_alpha"])):
        patterns = settings.get(field) or {}
        first = {
            p: next((patterns[key] for key in patterns if match_pattern(key, p)), default) for p in found
        }
        kept[field] = tuple(_disjoint(patterns, first, default).items())
    shape = {
        "rank": settings["r"],
        "alpha": float(settings["lora_alpha"]),
        "use_rslora": bool(settings.get("use_rslora")),
        "targets": _target_names(config, masks),
        **kept,
    }
    return _assemble(root, config, Job(**shape), tensors), shape


def read_config(root: Path) -> dict[str, Any]:
    """Return `adapter_config.json`, checked to describe plain LoRA; raises `UserError` otherwise."""
    if not (root / CONFIG).is_file():
        raise UserError(f"{root}: not a PEFT adapter: {CONFIG} is missing")
    if not (root / WEIGHTS).is_file():
        hint = " (adapter_model.bin is a pickle; load it in PEFT and save it with safe_serialization=True)"
        raise UserError(
            f"{root}: {WEIGHTS} is missing{hint if (root / 'adapter_model.bin').exists() else ''}"
        )
    try:
        settings = json.loads((root / CONFIG).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise UserError(f"{root / CONFIG}: not valid JSON: {err}") from None
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else type(settings).__name__
        raise UserError(f"{root / CONFIG}: peft_type is {kind!r}; only LORA adapters can be loaded")
    settings.setdefault("r", 8), settings.setdefault("lora_alpha", 8)  # PEFT's defaults
    for key, (holds, words) in _HOLDS.items():
        if not holds(settings.get(key)):
            raise UserError(
                f"{root / CONFIG}: {key} is {reprlib.repr(settings.get(key))}; it must be {words}"
            )
    unsupported = [
        f"{key}={value!r}" for key, value in settings.items() if key not in _KNOWN.split() and value
    ]
    if settings.get("bias", "none") != "none":
        unsupported.append(f"bias={settings['bias']!r}")
    if settings.get("init_lora_weights") not in _PLAIN_STARTS:
        unsupported.append(
            f"init_lora_weights={settings['init_lora_weights']!r} (it changes the base weights)"
        )
    if unsupported:
        raise UserError(
            f"{root / CONFIG}: only plain LoRA can be loaded, but it sets {', '.join(unsupported)}"
        )
    return settings


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write tensors as safetensors; a full disk is an OSError, as it is for every other file."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as err:
        code = re.search(r"os error (\d+)", str(err))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None


def replace_directory(ready: Path, target: Path) -> None:
    """Put a finished directory in its place by rename; one already there is moved aside, then removed."""
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    ready.rename(target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _targeted(settings: Mapping[str, Any], paths: list[str]) -> set[str] | None:
    """Return the module paths that PEFT would adapt (`check_target_module_exists`, peft 0.21)."""
    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if targets is None:
        return None
    hit = _matcher(targets, LINEAR)
    chosen = {path for path in paths if hit(path)}
    whole = set() if isinstance(targets, str) else set(targets)  # a full path ignores layers_to_transform
    if excluded := settings.get("exclude_modules"):
        out = _matcher(excluded)
        chosen = {path for path in chosen if not out(path)}
    if layers is not None and layers != []:
        wanted = {layers} if isinstance(layers, int) else set(layers)
        names = settings.get("layers_pattern") or r"[^.]*"
        heads = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in ([names] if isinstance(names, str) else names)]
        chosen = {
            p
            for p in chosen
            if p in whole or any((m := re.match(h, p)) and int(m[1]) in wanted for h in heads)
        }
    return chosen


def _matcher(entries: str | Iterable[str], everything: str | None = None) -> Callable[[str], bool]:
    if isinstance(entries, str):
        if everything and entries.lower() == everything:
            return lambda path: True
        return lambda path: re.fullmatch(entries, path) is not None
    ends = tuple(f".{entry}" for entry in entries)
    return lambda path: f".{path}".endswith(ends)


def _sort_keys(root: Path, config: ModelConfig, tensors: Mapping[str, Any]) -> set[str]:
    """Return the modules that have both matrices; raise `UserError` for every other key, by kind."""
    known = {path for _, _, path in modules(config)}
    halves: dict[str, set[str]] = {"A": set(), "B": set()}
    strange: dict[str, list[str]] = {}
    for key in sorted(tensors):
        match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", key)
        if match and match[1] in known:
            halves[match[2]].add(match[1])
        else:
            strange.setdefault(_kind(key), []).append(key)
    for kind, keys in strange.items():
        _refuse(f"has {kind}", root, keys)
    _refuse("has only one of lora_A and lora_B for", root, sorted(halves["A"] ^ halves["B"]))
    return halves["A"]


def _kind(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return "DoRA tensors, which are not supported:"
    if "embed" in key or "lm_head" in key:
        return "trained embedding or head tensors, which are not supported:"
    if key.endswith("bias"):
        return "trained biases, which are not supported:"
    if ".lora_" in key:
        return "adapters for modules that this model does not have:"
    return "tensors that are not LoRA matrices (modules_to_save?):"


def _assemble(root: Path, config: ModelConfig, job: Job, tensors: Mapping[str, Any]) -> Adapter:
    rank, wrong = ranks(config, job), []
    shapes = {site.name: site for site in config.sites}
    out = {}
    for name, r in rank.items():
        a = np.zeros((config.n_layers, int(r.max()), shapes[name].d_in), np.float32)
        b = np.zeros((config.n_layers, shapes[name].d_out, int(r.max())), np.float32)
        for layer in np.flatnonzero(r):
            path = config.module_path(shapes[name], int(layer))
            for half, to in (("A", a[layer, : r[layer]]), ("B", b[layer, :, : r[layer]])):
                tensor = tensors[f"{_PREFIX}{path}.lora_{half}.weight"]
                if tensor.shape == to.shape:
                    to[...] = np.asarray(tensor, np.float32)
                else:
                    wrong.append(f"{path}.lora_{half} {list(tensor.shape)}, expected {list(to.shape)}")
        out[name] = Factors(jnp.asarray(a), jnp.asarray(b))
    _refuse("has tensors of the wrong shape for this model and rank:", root, wrong)
    return out


def _refuse(what: str, root: Path, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        raise UserError(f"{root / WEIGHTS} {what} {', '.join(names[:6])}{more}")


def _target_names(config: ModelConfig, masks: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Name modules as `target_modules` does: a site in all layers by its name, else by each module's path."""
    names: list[str] = []
    for site in config.sites:
        mask = masks.get(site.name, np.zeros(config.n_layers, bool))
        if mask.all():
            names.append(site.name)
        else:
            names += [config.module_path(site, int(layer)) for layer in np.flatnonzero(mask)]
    return tuple(names)


def _patterns(
    config: ModelConfig, patterns: dict[str, Any], values: Mapping[str, np.ndarray], default: float
) -> dict[str, Any]:
    used = {
        path: values[site.name][layer].item()
        for site, layer, path in modules(config)
        if site.name in values and values[site.name][layer] > 0
    }
    return {key: _plain(value) for key, value in _disjoint(patterns, used, default).items()}


def _disjoint(patterns: Mapping[str, Any], values: Mapping[str, Any], default: float) -> dict[str, Any]:
    """Return patterns that give every module its value whatever order they are tried in.

    Patterns that share no module stay as they are (those that match none are left out); others are replaced
    by one full path a module.
    """
    hits = {key: {path for path in values if match_pattern(key, path)} for key in patterns}
    if sum(map(len, hits.values())) == len(set().union(*hits.values())):
        return {key: patterns[key] for key in patterns if hits[key]}
    return {path: value for path, value in values.items() if value != default}


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
