"""Causal attention within the examples of packed sequences, by XLA or by cuDNN, as the configuration says."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from plora_jax.errors import UserError
from plora_jax.models.config import ModelConfig

FULL = jnp.iinfo(jnp.int32).max  # the window of a layer without one


def visible(rows: Int32[Array, "B S"], segments: bool, implementation: str) -> Bool[Array, "#B S S"] | None:
    """Tell which keys (last axis) each query may see: not later, and of the same example.

    Padding (row -1) sees padding alone, so no query is without a key and no softmax is NaN. Without `segments`
    each sequence holds one example, its padding at the end, and causality alone keeps padding out. cuDNN knows
    causality by itself, so that it then needs no mask at all.
    """
    same = rows[:, :, None] == rows[:, None, :] if segments else None  # [B, S, S]
    if implementation == "cudnn":
        return same
    index = jnp.arange(rows.shape[-1])
    causal = (index[:, None] >= index[None, :])[None]  # [1, S, S]
    return causal if same is None else causal & same


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    seen: Bool[Array, "#B S S"] | None,
    window: Int32[Array, ""] | None,
    config: ModelConfig,
    implementation: str,
) -> Float[Array, "B S N H"]:
    """Attend with grouped heads; `window` is this layer's (None: no layer of the model has one that matters).

    Scores and softmax are at least float32. Under vmap every job's sequences are folded into the batch axis.
    """
    if implementation == "cudnn":
        return _attend_cudnn(q, k, v, seen, window, config)
    assert seen is not None  # `visible` gives a mask for all but cuDNN
    if window is not None:
        index = jnp.arange(q.shape[1])
        seen = seen & (index[:, None] - index[None, :] < window)
    return _attend_xla(q, [(heads_first(k), heads_first(v))], seen, config)


def attend_past(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    past: tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]],
    apart: Int32[Array, "B T"],
    window: Int32[Array, ""] | None,
    config: ModelConfig,
) -> Float[Array, "B 1 N H"]:
    """Attend from one new token to the keys and values of earlier ones, `past`, and to itself, as `attend` does.

    `apart` tells how many positions before the new token each key stands, and is negative where there is no key.
    """
    seen = (apart > 0) if window is None else (apart > 0) & (apart < window)
    seen = jnp.pad(seen, ((0, 0), (0, 1)), constant_values=True)[:, None]  # [B, 1, T + 1]
    return _attend_xla(q, [past, (heads_first(k), heads_first(v))], seen, config)


def heads_first(x: Float[Array, "B S K H"]) -> Float[Array, "B K S H"]:
    """Put heads before positions, so that no product has to transpose the scores [S, S] or what is cached."""
    return x.transpose(0, 2, 1, 3)


def _attend_xla(q: Array, pieces: Sequence[tuple[Array, Array]], seen: Array, config: ModelConfig) -> Array:
    """Attend to keys and values in pieces [B, K, T, H]; the last axis of `seen` goes through them in order."""
    B, S, N, H = q.shape
    K, wide = pieces[0][0].shape[1], jnp.promote_types(q.dtype, jnp.float32)
    q = q.reshape(B, S, K, N // K, H).transpose(0, 2, 3, 1, 4)  # [B, K, N/K, S, H]
    parts = [jnp.einsum("bkgsh,bkth->bkgst", q, k, preferred_element_type=wide) for k, _ in pieces]
    scores = jnp.concatenate(parts, axis=-1) * config.attn_scale  # [B, K, N/K, S, T]
    if config.attn_softcap:
        scores = config.attn_softcap * jnp.tanh(scores / config.attn_softcap)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    edges = np.cumsum([part.shape[-1] for part in parts])[:-1]
    shares = zip(jnp.split(weights, edges, axis=-1), pieces, strict=True)
    out = reduce(add, [jnp.einsum("bkgst,bkth->bkgsh", w, v) for w, (_, v) in shares])  # [B, K, N/K, S, H]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, S, N, H)


def _attend_cudnn(
    q: Array, k: Array, v: Array, seen: Array | None, window: Array | None, config: ModelConfig
) -> Array:
    B, S, N, _ = q.shape
    # Under vmap jax reshapes the mask to [J·B, N, S, S], so it must have all heads.
    mask = None if seen is None else jnp.broadcast_to(seen[:, None], (B, N, S, S))

    def flash(local: int | None) -> Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=True,
            scale=config.attn_scale,
            local_window_size=None if local is None else (local - 1, 0),
            implementation="cudnn",
        )

    widths = {w for w in config.layer_window if 0 < w < S}
    if window is None or not widths:
        return flash(None)
    (width,) = widths  # cuDNN wants it static; every family has one width
    return jax.lax.cond(window < S, lambda: flash(width), lambda: flash(None))


def choose_attention(config: ModelConfig, dtype: Any, platform: str) -> Literal["xla", "cudnn"]:
    """Choose cuDNN for 16-bit models on NVIDIA GPUs where it serves the model, XLA everywhere else."""
    fits = platform == "gpu" and jnp.dtype(dtype).itemsize == 2 and not config.cudnn_obstacle
    return "cudnn" if fits else "xla"


def check_attention(config: ModelConfig, implementation: str) -> None:
    """Raise `UserError` when this model cannot run with this implementation, before anything is compiled."""
    if implementation not in ("xla", "cudnn"):
        raise UserError(f"attention must be xla or cudnn, found {implementation!r}")
    if implementation == "cudnn" and config.cudnn_obstacle:
        raise UserError(f"attention cudnn cannot run this {config.family}: {config.cudnn_obstacle}; use xla")
