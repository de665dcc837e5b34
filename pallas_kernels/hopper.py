"""The packed LoRA products on Hopper GPUs: the frozen products with their adapters in one kernel each.

Same contract as `reference`. The fused kernel does x·W and dy·Wᵀ with everything that must touch their operands; the
sums over tokens for dA and dB, and shrinks too wide for a leader tile, stay with XLA, whose products run at the
memory bandwidth there (docs/benchmarks.md).
"""

import jax.numpy as jnp

from . import reference
from .hopper_gemm import DEFAULT, MAX_SHRINK, Extra, Shrink, lora_gemm, shrink_width
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
    leader, u = None, None
    if mask is None and rows <= MAX_SHRINK:
        leader = max(adapted(sites), key=lambda i: sites[i].d_out)
    else:
        u = (job_product(masked(x, mask), a, "tk,nk", jnp.float32) * scale[:, None, :]).astype(dtype)
    starts, at = {}, 0
    for i in adapted(sites):
        starts[i], at = at, at + sites[i].a.shape[1]
    ys: dict[int, jnp.ndarray] = {}
    # the leader's launch comes first and gives u to the others
    for i in sorted(range(len(sites)), key=lambda i: i != leader):
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
    xm, out = masked(x, mask), reference.gradient_dtype(sites)
    dx, dus = _dx(mask, sites, dys, config, interpret)
    das: list = [None] * len(sites)
    dbs = list(das)
    for i, du in dus.items():
        das[i] = job_product(du, xm, "tk,tn", out)
        dbs[i] = job_product(dys[i], us[i], "tk,tn", out)
    return dx, tuple(das), tuple(dbs)


def _dx(mask, sites, dys, config, interpret):
    """Return dx and, by site, du = scale·(dy·B), all from one launch where the ranks fit in it."""
    dtype = dys[0].dtype
    products = tuple((dy, site.w.astype(dtype)) for dy, site in zip(dys, sites, strict=True))
    ranks = {i: sites[i].a.shape[1] for i in adapted(sites)}
    more = {i: rank_rows(rank) - rank for i, rank in ranks.items()}
    bts = {i: _pad(sites[i].b.astype(dtype).swapaxes(1, 2), 1, 0, more[i]) for i in ranks}
    scales = {
        i: jnp.broadcast_to(sites[i].scale.astype(jnp.float32)[:, None], bts[i].shape[:2]) for i in ranks
    }
    shrinks: tuple[Shrink, ...] = ()
    extras: tuple[Extra, ...] = ()
    sources: dict = {}
    if max((shrink_width(bt.shape[1]) for bt in bts.values()), default=0) <= MAX_SHRINK:
        shrinks = tuple(Shrink(i, bts[i], scales[i]) for i in ranks)
        sources = dict(zip(ranks, range(len(ranks)), strict=True))
    else:
        for i in ranks:
            du = job_product(dys[i], bts[i], "tk,nk", jnp.float32)
            sources[i] = (du * scales[i][:, None, :]).astype(dtype)
    if mask is None:
        ats = {i: _pad(sites[i].a.astype(dtype).swapaxes(1, 2), 2, 0, more[i]) for i in ranks}
        extras = tuple(Extra(sources[i], 0, ats[i]) for i in ranks)
    dx, made = lora_gemm(products, shrinks, extras, transposed=True, config=config, interpret=interpret)
    if shrinks:
        sources = dict(zip(ranks, made, strict=True))
    dus = {i: sources[i][:, :, :rank] for i, rank in ranks.items()}
    if mask is not None:  # the mask falls on the adapters' part alone
        acc = accumulator(dtype)
        parts = [
            job_product(du, sites[i].a.astype(dtype), "tk,kn", dtype).astype(acc) for i, du in dus.items()
        ]
        dx = (dx.astype(acc) + sum(parts) * mask.astype(acc)).astype(dtype)
    return dx, dus
