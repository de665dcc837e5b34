"""Rotary position embedding: the frequencies of every supported kind, in numpy."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from plora_jax.errors import UserError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """Describe one rotary embedding of the first `dim` features of a head.

    kind: default | linear | llama3 | yarn | longrope as in config.json, or none (NoPE: nothing rotates).
    `short` and `long` are LongRoPE's divisors for examples up to and beyond `original` tokens.
    """

    kind: str
    dim: int
    theta: float = 10_000.0
    factor: float = 1.0
    original: int = 0
    magnitude: float = 1.0  # multiplies cos and sin (yarn, longrope)
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


def rope_from_hf(params: dict[str, Any], head_dim: int, max_positions: int, name: str) -> Rope:
    """Read the rope fields of config.json, merged from rope_theta and rope_scaling or rope_parameters.

    Raises:
        UserError: an unknown rope type, or a field that its type needs is missing or of the wrong length.
    """
    kind = params.get("rope_type") or params.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # the first Phi-3 checkpoints
    if kind not in KINDS:
        raise UserError(f"{name}: rope type {kind!r} is not supported; supported are {', '.join(KINDS)}")
    dim = int(head_dim * params["partial_rotary_factor"])
    rope = Rope(kind, dim, float(params["rope_theta"]))
    if dim % 2:
        raise UserError(f"{name}: rope needs an even number of rotary features, found {dim}")
    if kind == "default":
        return rope
    original = params.get("original_max_position_embeddings") or max_positions
    needed = {"linear": ["factor"], "longrope": ["short_factor", "long_factor"], "yarn": ["factor"]}
    for key in needed.get(kind, ["factor", "low_freq_factor", "high_freq_factor"]):
        if params.get(key) is None:
            raise UserError(f"{name}: rope type {kind} needs {key}")
    if kind == "linear":
        return Rope(kind, dim, rope.theta, float(params["factor"]))
    if kind == "llama3":
        low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
        return Rope(kind, dim, rope.theta, float(params["factor"]), original, low=low, high=high)
    factor = float(params.get("factor") or max_positions / original)
    if kind == "yarn":
        return Rope(
            kind,
            dim,
            rope.theta,
            factor,
            original,
            magnitude=_yarn_magnitude(params, factor),
            beta_fast=float(params.get("beta_fast") or 32),
            beta_slow=float(params.get("beta_slow") or 1),
            truncate=bool(params.get("truncate", True)),
        )
    short, long = tuple(params["short_factor"]), tuple(params["long_factor"])
    if not len(short) == len(long) == dim // 2:
        raise UserError(
            f"{name}: longrope needs {dim // 2} short and long factors, found {len(short)} and {len(long)}"
        )
    magnitude = params.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(kind, dim, rope.theta, factor, original, float(magnitude), short=short, long=long)


def _yarn_magnitude(params: dict[str, Any], factor: float) -> float:
    """Temper attention as YaRN does (Peng et al. 2023, eq. 22), or by DeepSeek's two mscales where given."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    m, m_all = params.get("mscale"), params.get("mscale_all_dim")
    return mscale(m) / mscale(m_all) if m and m_all else mscale(1.0)


def frequencies(rope: Rope, long: bool = False) -> np.ndarray:
    """Compute the angle per position of each feature pair, float64 [dim/2].

    References:
        RoFormer (Su et al. 2021); YaRN (Peng et al. 2023); LongRoPE (Ding et al. 2024); llama3: the reference
        code of Llama 3.1.
    """
    if rope.kind == "none":
        return np.zeros(rope.dim // 2)
    plain = rope.theta ** -(np.arange(0, rope.dim, 2) / rope.dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        return plain / np.asarray(rope.long if long else rope.short)
    if rope.kind == "llama3":  # long waves are stretched, short ones kept, a linear blend between
        turns = rope.original * plain / (2 * math.pi)
        keep = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        return keep * plain + (1 - keep) * plain / rope.factor
    low, high = (_pair_turning(rope, beta) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    stretch = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return stretch * plain / rope.factor + (1 - stretch) * plain


def _pair_turning(rope: Rope, turns: float) -> float:
    """Find the feature pair that turns this many times over the original context (YaRN)."""
    return rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
