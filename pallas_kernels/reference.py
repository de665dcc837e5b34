"""The packed LoRA products in plain XLA: right on every device, dtype and shape, and the yardstick of the kernels.

Everything here is written over J jobs at once. `x` (and `mask`) may carry a job axis of 1, meaning that all jobs
read the same tokens: the frozen product is then computed once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import fp8
from .fp8 import Fp8Weight, Rounded, sum_transposed
from .glu import glu, glu_back, widen


class Site(NamedTuple):
    """One frozen Linear with the adapters of J jobs; `w` None leaves only the adapters, `a` None only the Linear."""

    w: Any  # [D, F], an Fp8Weight of that shape, or None
    bias: Any  # [F] or None
    a: Any  # [J, R, D] or None
    b: Any  # [J, F, R] or None
    scale: Any  # [J] or None

    @property
    def d_out(self) -> int:
        """Return F, the output features."""
        return self.w.shape[-1] if self.w is not None else self.b.shape[-2]


def accumulator(dtype) -> jnp.dtype:
    """Return the dtype sums are kept in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def holds_fp8(sites) -> bool:
    """Say whether the frozen weights are 8-bit numbers."""
    return any(isinstance(site.w, Fp8Weight) for site in sites)


def masked(x, mask):
    """Return the adapters' input: x times the dropout mask, multiplied in float32 so that 1/(1-p) is not rounded."""
    x = x.x if isinstance(x, Rounded) else x
    if mask is None:
        return x
    acc = accumulator(x.dtype)
    return (x.astype(acc) * mask.astype(acc)).astype(x.dtype)


def adapted(sites: tuple[Site, ...]) -> list[int]:
    """Return the indices of the sites that carry adapters."""
    return [i for i, site in enumerate(sites) if site.a is not None]


def gradient_dtype(sites) -> jnp.dtype:
    """Return the dtype that products give dA and dB in: the adapters', so that no wider array is written first."""
    return jnp.result_type(*(site.a for site in sites if site.a is not None))


def stacked_a(sites, dtype):
    """Return the A of all adapted sites side by side along the rank, cast for the product: [J, ΣR, D]."""
    return jnp.concatenate([sites[i].a.astype(dtype) for i in adapted(sites)], axis=1)


def stacked_scale(sites, dtype):
    """Return the scale of every row of `stacked_a`: [J, ΣR]."""
    rows = [
        jnp.broadcast_to(sites[i].scale.astype(dtype)[:, None], sites[i].a.shape[:2]) for i in adapted(sites)
    ]
    return jnp.concatenate(rows, axis=1)


def split_ranks(stacked, sites, axis):
    """Split an array stacked along the ranks of the adapted sites into one per site (None where not adapted)."""
    parts: list[jax.Array | None] = [None] * len(sites)
    at = 0
    for i in adapted(sites):
        rank = sites[i].a.shape[1]
        parts[i] = jax.lax.slice_in_dim(stacked, at, at + rank, axis=axis)
        at += rank
    return tuple(parts)


@jax.named_scope("lora")
def job_product(x, y, dims: str, out_dtype):
    """Multiply per job with float32 accumulation: "tk,nk", "tk,kn" or "tk,tn"; either may have a job axis of 1."""
    left, right = dims.split(",")
    out = "".join(c for c in left + right if (left + right).count(c) == 1)
    jl, jr = x.shape[0], y.shape[0]
    if jl == jr:
        return jnp.einsum(f"j{left},j{right}->j{out}", x, y, preferred_element_type=out_dtype)
    if jl == 1:
        return jnp.einsum(f"{left},j{right}->j{out}", x[0], y, preferred_element_type=out_dtype)
    return jnp.einsum(f"j{left},{right}->j{out}", x, y[0], preferred_element_type=out_dtype)


def _frozen(x, w):
    """Return x·W, one product over the tokens of all jobs."""
    flat = jax.tree.map(lambda t: t.reshape(-1, t.shape[-1]), x)
    if isinstance(w, Fp8Weight):
        return w.product(flat)
    return masked(flat, None) @ w.astype(x.dtype)


def _frozen_transposed(dys, ws, rounded):
    """Return Σ dy·Wᵀ term by term; of fp8 weights in one."""
    pairs = [(dy.reshape(-1, dy.shape[-1]), w) for dy, w in zip(dys, ws, strict=True) if w is not None]
    eight = [pair for pair in pairs if isinstance(pair[1], Fp8Weight)]
    if rounded is not None:
        values, scale = rounded
        rounded = [v.reshape(-1, v.shape[-1]) for v in values], scale.reshape(-1)
    terms = [sum_transposed(*zip(*eight, strict=True), rounded)] if eight else []
    wide = (pair for pair in pairs if not isinstance(pair[1], Fp8Weight))
    return terms + [jnp.einsum("tf,df->td", dy, w.astype(dy.dtype)) for dy, w in wide]


def forward(x, mask, sites: tuple[Site, ...]):
    """Compute y = x·W + bias + scale·((x·mask)·Aᵀ)·Bᵀ for all sites that read x.

    Args:
      x: [Jx, T, D], Jx is J or 1, an array or `Rounded`. mask: [Jm, T, D] or None. sites: adapters of J jobs.

    Returns:
      (ys, us): y per site [J, T, F] (Jx in place of J without adapter), and per site the scaled shrink
      scale·(x·mask)·Aᵀ in x's dtype [J, T, R], which the backward pass needs.
    """
    acc = accumulator(x.dtype)
    us: tuple[jax.Array | None, ...] = (None,) * len(sites)
    if adapted(sites):
        u = job_product(masked(x, mask), stacked_a(sites, x.dtype), "tk,nk", acc)
        u = (u * stacked_scale(sites, acc)[:, None, :]).astype(x.dtype)
        us = split_ranks(u, sites, axis=2)
    ys = []
    for site, u in zip(sites, us, strict=True):
        terms = []
        if site.w is not None:
            base = _frozen(x, site.w)
            terms.append(base.reshape(*x.shape[:2], site.d_out).astype(acc))
        if u is not None:
            terms.append(job_product(u, site.b.astype(x.dtype), "tk,nk", x.dtype).astype(acc))
        if site.bias is not None:
            terms.append(site.bias.astype(acc))
        ys.append(sum(terms[1:], terms[0]).astype(x.dtype))
    return tuple(ys), us


def backward(x, mask, sites: tuple[Site, ...], us, dys, rounded=None):
    """Compute the gradients of `forward` with respect to x and the adapters; W has none by design.

    Args:
      x, mask, sites: as for `forward`. us: its second result. dys: cotangents [J, T, F], one a site.
      rounded: `fp8.round_gradients` of dys where they are known already, all sites' weights being fp8.

    Returns:
      (dx, das, dbs): dx [J, T, D] in x's dtype (one per job also when x was shared), dA [J, R, D] and
      dB [J, F, R] per site in the adapter's dtype, None where a site has no adapter.
    """
    dtype, acc = x.dtype, accumulator(x.dtype)
    frozen = _frozen_transposed(dys, [site.w for site in sites], rounded)
    terms = [term.reshape(*dys[0].shape[:2], x.shape[-1]).astype(acc) for term in frozen]
    das: tuple[jax.Array | None, ...] = (None,) * len(sites)
    dbs = list(das)
    if adapted(sites):
        du = jnp.concatenate(
            [job_product(dys[i], sites[i].b.astype(dtype), "tk,kn", acc) for i in adapted(sites)], axis=2
        )
        du = (du * stacked_scale(sites, acc)[:, None, :]).astype(dtype)
        back = job_product(du, stacked_a(sites, dtype), "tk,kn", dtype).astype(acc)
        terms.append(back if mask is None else back * mask.astype(acc))
        out = gradient_dtype(sites)
        das = split_ranks(job_product(du, masked(x, mask), "tk,tn", out), sites, axis=1)
        for i in adapted(sites):
            dbs[i] = job_product(dys[i], us[i], "tk,tn", out)
    dx = sum(terms[1:], terms[0]).astype(dtype)
    return dx, das, tuple(dbs)


def forward_glu(activation, x, mask, sites: tuple[Site, ...], forward=forward, round_glu=fp8.round_glu):
    """Compute gate, up and activation(gate)·up, in float32 at least, of gate's and up's sites.

    Args:
      activation: of `glu.ACTIVATIONS`. x, mask, sites: as for `forward`, which may be another implementation's.
      round_glu: gives the third result on fp8 weights, `Rounded` for the next product.

    Returns:
      ((gate, up, h), us): three results in place of the two of `forward`.
    """
    (gate, up), us = forward(x, mask, sites)
    if holds_fp8(sites):
        return (gate, up, round_glu(activation, gate, up)), us
    return (gate, up, glu(activation, *widen(gate, up)).astype(gate.dtype)), us


def backward_glu(
    activation, h, mask, sites, us, dys, ys, ws, backward=backward, round_glu_back=fp8.round_glu_back
):
    """Compute from dy of the site that reads h = activation(gate)·up the gradients of gate and up, and its dA and dB.

    Args:
      h: what `forward_glu` returned, or None: it is computed again. mask, sites, us, dys: as for `backward`, which
        may be another implementation's. ys: gate and up. ws: their weights.
      round_glu_back: rounds the gradients where these are fp8.

    Returns:
      (dys, rounded, das, dbs): the first two as `backward` of gate's and up's sites takes them.
    """
    gate, up = ys
    h = glu(activation, *widen(gate, up)).astype(gate.dtype) if h is None else h
    dh, das, dbs = backward(h, mask, sites, us, dys)
    if holds_fp8(sites):
        columns, kind = [w.scale for w in ws], fp8.gradient_format(ws)
        return *round_glu_back(activation, gate, up, dh, columns, kind), das, dbs
    dys = tuple(dy.astype(gate.dtype) for dy in glu_back(activation, *widen(gate, up, dh)))
    return dys, None, das, dbs
