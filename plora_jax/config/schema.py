"""Check plain values against dataclass fields: types, ranges, unknown keys, and words for what is allowed."""

import difflib
import math
import re
import types
from dataclasses import MISSING, Field
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin

from plora_jax.config.yamlfile import NUMBER, Faults, Place, shown

SPOKEN = {  # what users of other tools write, and the word here
    "lr": "learning_rate",
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "lora_target_modules": "targets",
    "bs": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "lr_scheduler": "scheduler",
    "lr_scheduler_type": "scheduler",
    "warmup": "warmup_ratio",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "optim": "optimizer",
    "base_model": "model",
    "val": "eval",
    "validation": "eval",
    "dataset": "data",
    "datasets": "data",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "num_samples": "sample",
    "max_tokens": "max_new_tokens",
    "n": "sample",
    "strategy": "method",
    "n_trials": "budget",
    "max_trials": "budget",
    "eta": "reduction_factor",
    "min_resource": "grace_period",
    "every": "every_epochs",
}


def _bounds(meta: Any) -> str:
    low, high = (end if end is None else f"{end:.15g}" for end in (meta.get("low"), meta.get("high")))
    if low is None:
        return "" if high is None else f" ≤ {high}"
    above = f"{'>' if meta.get('open_low') else '≥'} {low}"
    return (
        f" {above}"
        if high is None
        else f" {above} and ≤ {high}"
        if meta.get("open_low")
        else f" from {low} to {high}"
    )


def allowed(kind: Any, meta: Any) -> str:
    """Say in words what a field of this annotation and metadata accepts."""
    origin, args = get_origin(kind), get_args(kind)
    if meta.get("allowed"):
        return str(meta["allowed"])
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin in (Union, types.UnionType):
        rest = [arg for arg in args if arg is not types.NoneType]
        words = " or ".join(allowed(arg, meta) for arg in rest)
        return words + " or null" if len(rest) < len(args) else words
    if origin is tuple and get_origin(args[0]) is tuple:
        return f"a mapping from module pattern to {allowed(get_args(args[0])[1], meta)}"
    if origin is tuple:
        words = allowed(args[0], meta).removeprefix("a ")
        return "a list of " + re.sub("^(text|whole number|number)", r"\1s", words)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind] + (
        _bounds(meta) if kind in (int, float) else ""
    )


def convert(value: Any, kind: Any, meta: Any) -> Any:
    """Return the value in the annotation's own type; a ValueError says what is wrong and what is allowed."""
    if hasattr(value, "item"):  # a NumPy scalar in a library call
        value = value.item()
    origin, args = get_origin(kind), get_args(kind)
    wrong = ValueError(f"{shown(value)} is not allowed here; expected {allowed(kind, meta)}")
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        members = [arg for arg in args if arg is not types.NoneType]
        if len(members) == 1:
            return convert(value, members[0], meta)
        for member in members:
            try:
                return convert(value, member, meta)
            except ValueError:
                continue
        raise wrong
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        near = difflib.get_close_matches(value, args, 1) if isinstance(value, str) else []
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{shown(value)} is not known{meant}; expected {allowed(kind, meta)}")
    if origin is tuple and get_origin(args[0]) is tuple:
        if isinstance(value, (tuple, list)) and all(
            isinstance(v, (tuple, list)) and len(v) == 2 for v in value
        ):
            value = dict(value)
        if not isinstance(value, dict) or not value or not all(isinstance(key, str) and key for key in value):
            raise wrong
        item = get_args(args[0])[1]
        return tuple(sorted((key, convert(v, item, meta)) for key, v in value.items()))
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise wrong
        return tuple(_item(i, v, args[0], meta) for i, v in enumerate(value))
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise wrong
    if kind is str:
        if isinstance(value, PurePath):  # in a library call
            return str(value)
        if isinstance(value, str):
            return value
        raise ValueError(f"{shown(value)} is not text; expected {allowed(kind, meta)}, in quotes if need be")
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        raise ValueError(f"{shown(value)} is text; write the number without quotes, as {value.strip()}")
    if not isinstance(value, (int, float)) or (kind is int and not isinstance(value, int)):
        raise wrong
    low, high = meta.get("low"), meta.get("high")
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong
    if low is not None and (value < low or (meta.get("open_low") and value == low)):
        raise ValueError(f"{value} is too small; expected {allowed(kind, meta)}")
    if high is not None and value > high:
        raise ValueError(f"{value} is too large; expected {allowed(kind, meta)}")
    try:
        return kind(value)
    except OverflowError:
        raise wrong from None


def _item(index: int, value: Any, kind: Any, meta: Any) -> Any:
    try:
        return convert(value, kind, meta)
    except ValueError as error:
        raise ValueError(f"item {index}: {error}") from None


def unknown(key: str, known: list[str], belongs: dict[str, str] | None = None) -> str:
    """Say that a key is not known and what was probably meant; `belongs` names the section of other keys."""
    spelled = key.lower().replace("-", "_")
    meant = SPOKEN.get(spelled, spelled)
    near = [meant] if meant in known else difflib.get_close_matches(spelled, known, 1, 0.7)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    for name in [meant, *difflib.get_close_matches(spelled, belongs or (), 1, 0.8)]:
        if belongs and name in belongs:
            return f"unknown key here; {name} belongs under {belongs[name]}"
    return f"unknown key; known here: {', '.join(known)}"


def section(
    raw: Any, where: Place, known: dict[str, Field[Any]], faults: Faults, belongs: dict[str, str]
) -> dict[str, Any]:
    """Check a mapping against dataclass fields and return its values that hold; the rest are noted."""
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        faults.add(where, f"{shown(raw)} is not a mapping; known keys: {', '.join(known)}")
        return {}
    out = {}
    for key, value in raw.items():
        if key not in known:
            faults.add((*where, key), unknown(key, list(known), belongs))
            continue
        try:
            out[key] = convert(value, known[key].type, known[key].metadata)
        except ValueError as error:
            faults.add((*where, key), str(error))
    for name, spec in known.items():
        if name not in raw and spec.default is MISSING and spec.default_factory is MISSING:
            faults.add((*where, name), f"is missing; expected {allowed(spec.type, spec.metadata)}")
    return out
