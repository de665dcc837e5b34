"""Frozen weights in 8-bit floating point (OCP E4M3): half of bf16's bytes, products at twice its rate.

A weight is rounded once, with a scale for each output feature; what it is multiplied with is rounded on the fly, with a
scale for each token. The scale makes the largest number of its row the format's largest, so that this one, an outlier
as often as not, is hardly rounded at all.

Products, cuBLASLt's and the fused kernel's, want the summed axis last in both operands. Weights are stored [out, in],
as checkpoints have them: forward reads them as they lie, and only dx has them transposed.

References:
  OCP 8-bit floating point: https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .glu import glu, glu_back, widen

CAPABILITY = (8, 9)  # the first that multiplies 8-bit floats (Ada; then Hopper, Blackwell)
SMALLEST = 2.0**-100  # scale: rows of smaller numbers become zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """Hold one frozen weight W [D, F] as values [F, D] in E4M3 times a scale [F], in float32 or bfloat16.

    `backward` is the format that output gradients are rounded to: e4m3 has the precision, e5m2 the range.
    """

    values: Any
    scale: Any
    backward: Literal["e4m3", "e5m2"] = dataclasses.field(default="e4m3", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of W, (D, F)."""
        return self.values.shape[::-1]

    def product(self, x):
        """Compute x·W for x [T, D], an array or `Rounded`: [T, F] in float32 at least, summed to x's dtype."""
        own = rounded(x)
        return _multiply(own.values, self.values, 1, x.dtype) * own.scale * self.scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """Hold an array and what products with fp8 weights read of it: x ≈ values · scale.

    Gradients flow to x alone.
    """

    x: Any  # [..., D]
    values: Any  # [..., D] in E4M3
    scale: Any  # [..., 1] in float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of x."""
        return self.x.shape

    @property
    def dtype(self) -> Any:
        """Return the dtype of x."""
        return self.x.dtype


def rounded(x) -> Rounded:
    """Round an array for a product with fp8 weights; what is rounded stays as it is."""
    if isinstance(x, Rounded):
        return x
    values, scale = quantise(x)
    return Rounded(x, values, scale[..., None])


def round_glu(activation, gate, up) -> Rounded:
    """Compute activation(gate)·up in float32, round it to gate's dtype, and that to 8 bits.

    Args:
      activation: of `glu.ACTIVATIONS`. gate, up: [..., F].
    """
    return rounded(glu(activation, *widen(gate, up)).astype(gate.dtype))


def round_glu_back(activation, gate, up, dh, columns, dtype):
    """Compute the gradients of `round_glu` in float32, round them to gate's dtype, and these as `round_rows`.

    Returns:
      ((dgate, dup), what `round_rows` returns for them).
    """
    gradients = [t.astype(gate.dtype) for t in glu_back(activation, *widen(gate, up, dh))]
    return gradients, round_rows(gradients, columns, dtype)


def quantise(x, dtype=jnp.float8_e4m3fn):
    """Round to an 8-bit format with one scale over the last axis: x ≈ values · scale.

    Args:
      x: [..., D]. A row that is not finite has a scale that is not, and so no finite product.

    Returns:
      (values [..., D] in `dtype`, scale [...] in float32).
    """
    (values,), scale = round_rows((x.astype(jnp.float32),), (None,), dtype)
    return values, scale


def quantise_weight(w):
    """Round weights [..., F, D] as `quantise`, to scales that bfloat16 holds: gradients read them for every token.

    Returns:
      (values [..., F, D] in E4M3, scale [..., F] in bfloat16).
    """
    wide = w.astype(jnp.float32)
    exact = row_scale(jnp.max(jnp.abs(wide), axis=-1), jnp.float8_e4m3fn)
    # rounded up: the largest number would leave the format
    scale = (exact * (1 + 2.0**-8)).astype(jnp.bfloat16)
    return (wide * (1 / scale.astype(jnp.float32))[..., None]).astype(jnp.float8_e4m3fn), scale


def round_gradients(dys, weights):
    """Round dy [..., F] for each weight W of the sum Σ dy·Wᵀ to the weights' `backward` format, one for all.

    The scales of W belong to the summed axis: they join dy before it is rounded. A token has one scale in all of them,
    so that products can be summed. Returns as `round_rows`.
    """
    return round_rows(dys, [w.scale for w in weights], gradient_format(weights))


def gradient_format(weights):
    """Return the one format that the gradients for these weights are rounded to.

    Raises:
      ValueError: when they ask for different ones.
    """
    kinds = {w.backward for w in weights}
    if len(kinds) > 1:
        raise ValueError(
            f"weights that read the same input ask for gradients in {' and '.join(sorted(kinds))}"
        )
    (kind,) = kinds
    return {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[kind]


def round_rows(xs, columns, dtype):
    """Round x·column of several arrays to an 8-bit format with one scale a row for all of them.

    Args:
      xs: arrays [..., D], alike but for D. columns: one [D] each, or None.

    Returns:
      (values, one [..., D] in `dtype` for each x; scale [...] in float32).
    """
    wides = [x if column is None else x * column for x, column in zip(widen(*xs), columns, strict=True)]
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=-1) for x in wides))
    scale = row_scale(largest.astype(jnp.float32), dtype)
    return [(x * (1 / scale)[..., None]).astype(dtype) for x in wides], scale


def row_scale(largest, dtype):
    """Return the float32 scale that maps the largest number of a row to the format's, SMALLEST at least."""
    return jnp.maximum(largest / float(jnp.finfo(dtype).max), SMALLEST)


def sum_transposed(dys, weights, rounded=None):
    """Compute Σ dy·Wᵀ for one dy [T, F] a weight: [T, D], as `Fp8Weight.product`; dys may be `rounded` already."""
    values, scale = rounded or round_gradients(dys, weights)
    parts = [_multiply(dy, w.values, 0, dys[0].dtype) for dy, w in zip(values, weights, strict=True)]
    return sum(parts[1:], parts[0]) * scale[:, None]


def _multiply(x, w, axis, dtype):
    """Sum x's last axis with one of w's, rounded to `dtype` if it has the range, and return float32 at least."""
    wide = jnp.promote_types(dtype, jnp.float32)
    summed = wide if dtype == jnp.float16 else dtype
    y = jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=summed)
    return y.astype(wide)


def why_not(capability: str) -> str | None:
    """Say why a GPU of this compute capability ("9.0"; "" for what is none) cannot hold fp8 weights, None if it can."""
    if not capability or tuple(int(part) for part in capability.split(".")) >= CAPABILITY:
        return None
    need = ".".join(map(str, CAPABILITY))
    return f"compute capability {capability}, and fp8 products need {need} (L40S, RTX 4090, H100) or newer"
