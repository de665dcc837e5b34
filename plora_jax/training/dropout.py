"""LoRA dropout whose mask depends on the job and the token alone, never on how the pack is laid out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class Dropout(NamedTuple):
    """Hold what one job's masks are drawn from, apart from the token itself."""

    seed: Int32[Array, ""]
    rate: Float[Array, ""]
    epoch: Int32[Array, ""]


def dropout_mask(
    dropout: Dropout,
    layer: Int32[Array, ""] | int,
    source: int,
    rows: Int32[Array, "B S"],
    positions: Int32[Array, "B S"],
    d_in: int,
) -> Float[Array, "B S d_in"]:
    """Draw the mask of one adapter input: 0 with probability `rate`, else 1 / (1 - rate), in float32.

    The bits are threefry(seed, epoch, layer, source, row, position, feature), so the same example gets the same mask
    in any slot, at any micro-batch size or row filling, and in the backward pass of a recomputed layer. Sites that
    read the same input (q/k/v, gate/up) share a mask; PEFT draws one per site.
    """
    key = jax.random.key(dropout.seed, impl="threefry2x32")
    for value in (dropout.epoch, layer, source):
        key = jax.random.fold_in(key, value)

    def token_bits(row: Array, position: Array) -> Array:
        return jax.random.bits(
            jax.random.fold_in(jax.random.fold_in(key, row), position), (d_in,), jnp.uint32
        )

    bits = jax.vmap(jax.vmap(token_bits))(rows, positions)
    uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)  # 24 bits: exact in float32, in [0, 1)
    rate = dropout.rate.astype(jnp.float32)
    return jnp.where(uniform >= rate, 1.0 / (1.0 - rate), 0.0)
