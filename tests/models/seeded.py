"""Weights that a golden script under torch and the tests under JAX both make from a tensor's name alone."""

import zlib

import numpy as np


def seeded(key: str, shape: tuple[int, ...], norm_mean: float = 1.0) -> np.ndarray:
    """Draw one tensor, float32: norms near `norm_mean`, small biases, all else of unit gain."""
    draw = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in key.split(".")[-2]:
        return (norm_mean + 0.2 * draw).astype(np.float32)
    if key.endswith("bias"):
        return (0.3 * draw).astype(np.float32)
    if "embed_tokens" in key:
        return (0.3 * draw).astype(np.float32)
    return (draw / np.sqrt(shape[-1])).astype(np.float32)
