"""The packed LoRA products on Hopper GPUs: the frozen products with their adapters in one kernel each.

Same contract as `reference`. The fused kernel does x·W and dy·Wᵀ with everything that must touch their operands; the
sums over tokens for dA and dB, and shrinks too wide for a leader tile, stay with XLA, whose products run at the
memory bandwidth there (docs/benchmarks.md).
"""

import jax.numpy as jnp

from . import reference
from .hopper_gemm import DEFAULT, MAX_SHRINK, Extra, Shrink, lora_gemm
from .reference import Site, accumulator, adapted, job_product, masked

BLOCK = 64  # ranks a step of the kernel takes


def rank_rows(rank: int) -> int:
    """Return the rows a rank occupies: a multiple of 8, and of 64 above 64, as the copy engine wants."""
    step = 8 if rank <= BLOCK else BLOCK
    return -(-rank // step) * step


def _pad(array, axis, before, after):
    widths = [(0, 0)] * array.ndim
    widths[axis] = (before, after)
    return jnp.pad(array, widths)


def stack(sites, dtype):
    """Stack A and the scales of all adapted sites along the rank, padded to `rank_rows`: [J, P, D], [J, P]."""
    a, scale = reference.stacked_a(sites, dtype), reference.stacked_scale(sites, jnp.float32)
    more = rank_rows(a.shape[1]) - a.shape[1]
    return _pad(a, 1, 0, more), _pad(scale, 1, 0, more)


def expansion(b, at, rows, dtype):
    """Return Bᵀ placed at row `at` of the blocks of a stack of `rows` that it touches, and their first row."""
    rank = b.shape[2]
    first = at // BLOCK * BLOCK
    size = min(-(-(at + rank) // BLOCK) * BLOCK, rows) - first
    return _pad(b.astype(dtype).swapaxes(1, 2), 1, at - first, size - (at - first) - rank), first


def forward(x, mask, sites: tuple[Site, ...], *, config=lambda site: DEFAULT, interpret=None):
    """Compute the outputs and scaled shrinks of all sites; as `reference.forward`. config: the tiles for a site."""
    dtype = x.dtype
    a, scale = stack(sites, dtype)
    rows = a.shape[1]
    leader = None
    if mask is None and rows <= MAX_SHRINK:
        leader = max(adapted(sites), key=lambda i: sites[i].d_out)
        u = None
    else:
        u = (job_product(masked(x, mask), a, "tk,nk", jnp.float32) * scale[:, None, :]).astype(dtype)
    starts, at = {}, 0
    for i in adapted(sites):
        starts[i], at = at, at + sites[i].a.shape[1]
    ys: dict[int, jnp.ndarray] = {}
    for i in sorted(
        range(len(sites)), key=lambda i: i != leader
    ):  # the leader's launch gives u to the others
        site = sites[i]
        if site.a is None:
            ys[i] = reference.forward(x, None, (site,))[0][0]
            continue
        e, first = expansion(site.b, starts[i], rows, dtype)
        shrinks = (Shrink(0, a, scale),) if i == leader else ()
        extras = (Extra(0 if i == leader else u, first, e),)
        bias = None if site.bias is None else site.bias.astype(dtype)
        ys[i], made = lora_gemm(
            ((x, site.w.astype(dtype)),), shrinks, extras, bias=bias, config=config(site), interpret=interpret
        )
        u = made[0] if made else u
    us = reference.split_ranks(u, sites, axis=2)
    return tuple(ys[i] for i in range(len(sites))), us


def backward(x, mask, sites: tuple[Site, ...], us, dys, *, config=DEFAULT, interpret=None):
    """Compute dx, dA and dB of all sites; as `reference.backward`."""
    dtype, acc = x.dtype, accumulator(x.dtype)
    products = tuple((dy, site.w.astype(dtype)) for dy, site in zip(dys, sites, strict=True))
    some = adapted(sites)
    rows = {i: rank_rows(sites[i].a.shape[1]) for i in some}
    bts, scales = {}, {}
    for i in some:
        more = rows[i] - sites[i].a.shape[1]
        bts[i] = _pad(sites[i].b.astype(dtype).swapaxes(1, 2), 1, 0, more)
        scales[i] = jnp.broadcast_to(sites[i].scale.astype(jnp.float32)[:, None], bts[i].shape[:2])
    if sum(-(-r // 16) * 16 for r in rows.values()) <= MAX_SHRINK:
        shrinks = tuple(Shrink(i, bts[i], scales[i]) for i in some)
        sources = dict(zip(some, range(len(some)), strict=True))
    else:
        shrinks, sources = (), {}
        for i in some:
            du = job_product(dys[i], bts[i], "tk,nk", jnp.float32)
            sources[i] = (du * scales[i][:, None, :]).astype(dtype)
    extras = ()
    if mask is None:
        ats = {
            i: _pad(sites[i].a.astype(dtype).swapaxes(1, 2), 2, 0, rows[i] - sites[i].a.shape[1])
            for i in some
        }
        extras = tuple(Extra(sources[i], 0, ats[i]) for i in some)
    dx, made = lora_gemm(products, shrinks, extras, transposed=True, config=config, interpret=interpret)
    dus = dict(zip(some, made, strict=True)) if shrinks else sources
    if mask is not None:  # the mask falls on the adapters' part alone
        back = sum(
            job_product(dus[i][:, :, : sites[i].a.shape[1]], sites[i].a.astype(dtype), "tk,kn", dtype).astype(
                acc
            )
            for i in some
        )
        dx = (dx.astype(acc) + back * mask.astype(acc)).astype(dtype)
    xm = masked(x, mask)
    das, dbs = [None] * len(sites), [None] * len(sites)
    for i in some:
        das[i] = job_product(dus[i][:, :, : sites[i].a.shape[1]], xm, "tk,tn", acc)
        dbs[i] = job_product(dys[i], us[i], "tk,tn", acc)
    return dx, tuple(das), tuple(dbs)
