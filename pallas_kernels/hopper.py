"""The packed LoRA products on Hopper GPUs: the frozen products with their adapters in one kernel each.

Same contract as `reference`. The fused kernel does x·W and dy·Wᵀ with everything that must touch their operands; the
sums over tokens for dA and dB, and shrinks too wide for a leader tile, stay with XLA, whose products run at the
memory bandwidth there (docs/benchmarks.md).

On an fp8 base the kernel multiplies 8-bit numbers and adds what the adapters expand to in 16 bits, from shrinks of
XLA's: they read tokens before these are rounded, which the kernel does not see. The scales, which multiply everything
at the end, are divided out of what is added.
"""

import functools

import jax.numpy as jnp

from . import reference
from .fp8 import Fp8Weight, Rounded, gradient_format
from .hopper_gemm import DEFAULT, MAX_SHRINK, Extra, Scales, Shrink, lora_gemm, shrink_width
from .hopper_rows import round_rows
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
    """Return B placed at column `at` of the blocks of a stack of `rows` that it touches, and their first column."""
    rank = b.shape[2]
    first = at // BLOCK * BLOCK
    size = min(-(-(at + rank) // BLOCK) * BLOCK, rows) - first
    return _pad(b.astype(dtype), 2, at - first, size - (at - first) - rank), first


def forward(x, mask, sites: tuple[Site, ...], *, config=lambda site: DEFAULT, interpret=None):
    """Compute the outputs and scaled shrinks of all sites; as `reference.forward`. config: the tiles for a site."""
    dtype, fp8 = x.dtype, _is_fp8(sites)
    a, scale = stack(sites, dtype)
    rows = a.shape[1]
    leader, u = None, None
    if mask is None and rows <= MAX_SHRINK and not fp8:
        leader = max(adapted(sites), key=lambda i: sites[i].d_out)
    else:
        wide = job_product(masked(x, mask), a, "tk,nk", jnp.float32) * scale[:, None, :]
        u = wide.astype(dtype)
    if fp8:
        if isinstance(x, Rounded):
            values, token_scale = x.values, x.scale[..., 0]
        else:
            (values,), token_scale = round_rows((x,), (None,), jnp.float8_e4m3fn, interpret=interpret)
        added = (wide / token_scale[:, :, None]).astype(dtype)
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
        bias = None if site.bias is None else site.bias.astype(dtype)
        launch = functools.partial(lora_gemm, bias=bias, config=config(site), interpret=interpret)
        if fp8:
            e, first = expansion(site.b / site.w.scale[:, None], starts[i], rows, dtype)
            scales = Scales(token_scale, site.w.scale, dtype)
            ys[i], _ = launch(
                ((values, site.w.values),), (), (Extra(added, first, e),), scales=scales, transposed=True
            )
            continue
        e, first = expansion(site.b, starts[i], rows, dtype)
        shrinks = (Shrink(0, a, scale),) if i == leader else ()
        extras = (Extra(0 if i == leader else u, first, e.swapaxes(1, 2)),)
        ys[i], made = launch(((x, site.w.astype(dtype)),), shrinks, extras)
        u = made[0] if made else u
    us = reference.split_ranks(u, sites, axis=2)
    return tuple(ys[i] for i in range(len(sites))), us


def backward(x, mask, sites: tuple[Site, ...], us, dys, rounded=None, *, config=DEFAULT, interpret=None):
    """Compute dx, dA and dB of all sites; as `reference.backward`."""
    xm, out = masked(x, mask), reference.gradient_dtype(sites)
    dx, dus = _dx(mask, sites, dys, rounded, config, interpret)
    das: list = [None] * len(sites)
    dbs = list(das)
    for i, du in dus.items():
        das[i] = job_product(du, xm, "tk,tn", out)
        dbs[i] = job_product(dys[i], us[i], "tk,tn", out)
    return dx, tuple(das), tuple(dbs)


def _dx(mask, sites, dys, rounded, config, interpret):
    """Return dx and, by site, du = scale·(dy·B), all from one launch where the ranks fit in it."""
    dtype, fp8 = dys[0].dtype, _is_fp8(sites)
    ranks = {i: sites[i].a.shape[1] for i in adapted(sites)}
    more = {i: rank_rows(rank) - rank for i, rank in ranks.items()}
    bts = {i: _pad(sites[i].b.astype(dtype).swapaxes(1, 2), 1, 0, more[i]) for i in ranks}
    dus, added, shrinks, scales = {}, {}, (), None
    if fp8:
        ws = [site.w for site in sites]
        values, token_scale = rounded or round_rows(
            dys, [w.scale for w in ws], gradient_format(ws), interpret=interpret
        )
        products = [(own, site.w.values.T) for own, site in zip(values, sites, strict=True)]
        scales = Scales(token_scale, None, dtype)
    else:
        products = [(dy, site.w.astype(dtype)) for dy, site in zip(dys, sites, strict=True)]
    if not fp8 and max((shrink_width(bt.shape[1]) for bt in bts.values()), default=0) <= MAX_SHRINK:
        shrinks = [
            Shrink(i, bt, jnp.broadcast_to(sites[i].scale.astype(jnp.float32)[:, None], bt.shape[:2]))
            for i, bt in bts.items()
        ]
        added = dict(zip(ranks, range(len(ranks)), strict=True))
    else:
        for i, bt in bts.items():
            du = job_product(dys[i], bt, "tk,nk", jnp.float32) * sites[i].scale[:, None, None]
            dus[i] = du.astype(dtype)
            added[i] = (du / token_scale[:, :, None]).astype(dtype) if fp8 else dus[i]
    extras = []
    if mask is None:
        ats = {i: _pad(sites[i].a.astype(dtype).swapaxes(1, 2), 2, 0, more[i]) for i in ranks}
        extras = [Extra(added[i], 0, ats[i]) for i in ranks]
    dx, made = lora_gemm(
        products, shrinks, extras, scales=scales, transposed=True, config=config, interpret=interpret
    )
    dus |= dict(zip(ranks, made, strict=False))
    dus = {i: dus[i][:, :, :rank] for i, rank in ranks.items()}
    if mask is not None:  # the mask falls on the adapters' part alone
        acc = accumulator(dtype)
        parts = [
            job_product(du, sites[i].a.astype(dtype), "tk,kn", dtype).astype(acc) for i, du in dus.items()
        ]
        dx = (dx.astype(acc) + sum(parts) * mask.astype(acc)).astype(dtype)
    return dx, dus


def _is_fp8(sites) -> bool:
    return any(isinstance(site.w, Fp8Weight) for site in sites)
