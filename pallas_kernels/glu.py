"""Gated linear units: activation(gate)·up, which most decoders feed to the last product of their MLP.

References:
  Shazeer, GLU Variants Improve Transformer: https://arxiv.org/abs/2002.05202
"""

import functools
import math

import jax
import jax.numpy as jnp

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def widen(*arrays):
    """Return arrays as the unit is computed: in float32 at least."""
    return [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays]


def glu(activation, gate, up):
    """Compute activation(gate)·up of float32 numbers, in what a GPU kernel can: no division, no derivative."""
    return _value_and_slope(activation, gate)[0] * up


def glu_back(activation, gate, up, dh):
    """Return the gradients of `glu` with respect to gate and up."""
    value, slope = _value_and_slope(activation, gate)
    return dh * up * slope, dh * value


def _value_and_slope(activation, gate):
    """Return activation(gate) and its derivative; both activations are gate·σ(z) of some z."""
    z, slope = gate, 1.0
    if activation == "gelu_tanh":  # (1 + tanh z)/2 = σ(2z)
        two, cubic = 2 * math.sqrt(2 / math.pi), 0.044715 * gate * gate
        z, slope = two * gate * (1 + cubic), two * (1 + 3 * cubic)
    root = jax.lax.rsqrt(1 + jnp.exp(-z))
    sigmoid = root * root
    value = gate * sigmoid
    return value, sigmoid + value * (1 - sigmoid) * slope
