"""Hopper kernel: frozen products with the adapters of J jobs as extra K steps of the same accumulator.

    u[j]   = scale[j]·(x[j]·A[j]ᵀ)                       shrink
    out[j] = Σ x[j]·W + Σ u[j]·E[j] + bias               forward:  E = Bᵀ
    out[j] = Σ x[j]·Wᵀ + Σ u[j]·E[j]                     backward: x = dy, A ← Bᵀ, E = A

One warpgroup feeds a ring of shared-memory slots with TMA copies and runs ahead into the next tile; two warpgroups
multiply (wgmma), 64 rows each. A step of the ring is 64 columns of x with W, or 64 columns of u with E; of an fp8 base
it is 128 columns of x and W, whose scales multiply the accumulator at the end. What lies beyond the rank (or T, N) is
filled with zeros by the copy engine and cut off by its stores, so ranks and token counts need no padding in memory.
Every output tile lies inside one job. Behind the steps of a tile may come pieces of gate, or of gate and up, of which
and of the sums a `Unit` is made before they are stored, as a `Softmax` is of the sums alone.

The shrink rides along: the first tile of every row ("leader") multiplies the slots of x it has anyway with A too,
into a second accumulator, writes u and raises a flag. Leaders come first; the others need u in their last steps.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .glu import glu, glu_back
from .tiles import PIECE, STEP_BYTES, TILE_M, GemmConfig, fit_shared

WGS = 2  # warpgroups that multiply
ROWS = TILE_M // WGS
CAP = 76.0  # exp(CAP) times the columns there may be is a float32
MAX_SHRINK = 128  # ranks of a leader's further accumulator: 64 registers a thread


DEFAULT = GemmConfig()


class Shrink(NamedTuple):
    """u[j] = scale[j]·(x[j]·A[j]ᵀ) for the x of one of the products, in one array or, of an only shrink, in several."""

    product: int
    a: jax.Array  # [J, R, K]
    scale: jax.Array  # [J, R] float32
    ranks: tuple[int, ...] | None = None  # of the arrays, R in all

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the ranks of its arrays."""
        return self.ranks or (self.a.shape[1],)


class Extra(NamedTuple):
    """Add u[j]·E[j][row:row+R]; `u` is an array or the index of one that the shrinks make.

    A step takes 64 of R, so that rows beyond, which may be other sites', are multiplied by zeros.
    """

    u: Any  # jax.Array [J, T, R] | int
    e: jax.Array  # [J, ≥ R, N]
    row: int = 0  # a multiple of 8


class Scales(NamedTuple):
    """Multiply the sums of products of 8-bit numbers, and what is added to them but the bias, at the end."""

    rows: jax.Array  # [J, T] float32
    columns: jax.Array | None  # [N] float32 or bfloat16
    dtype: Any  # of the result and of `Extra`s


class Unit(NamedTuple):
    """Make a gated linear unit of the sums, which are up, or where that is given the gradient of the unit.

    The results are up and activation(gate)·up, or the gradients of gate and up.
    """

    activation: str  # of `glu.ACTIVATIONS`
    gate: jax.Array  # [J, T, N]
    up: jax.Array | None = None  # where the product is transposed
    again: bool = False  # give activation(gate)·up beside the gradients


class Softmax(NamedTuple):
    """Give exp(sum − shift), at most exp(CAP), in place of each sum, and add up a row's over the columns of a tile.

    With a softcap c the sums are c·tanh(sum / c), and the exponentials that are given, not their sums, times the
    derivative of that.
    """

    shift: jax.Array  # [J, T] float32
    softcap: float = 0.0  # none


def piece_width(ranks) -> int:
    """Return the columns in which u of any of these ranks leaves: 16, 32 or 64, for a swizzled store."""
    return next((width for width in (16, 32) if width >= max(ranks)), PIECE)


def shrink_width(ranks) -> int:
    """Return the columns that a shrink for arrays of these ranks accumulates, so that whole pieces leave of each."""
    piece, starts = piece_width(ranks), itertools.accumulate(ranks, initial=0)
    return max(start - (-rank // piece) * piece for start, rank in zip(starts, ranks, strict=False))


def _swizzled(shape, dtype):
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, plgpu.find_swizzle(shape[-1] * size * 8))
    tiling = plgpu.TilingTransform((8, swizzle // size))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _ring(of_products, of_extras, interpret):
    """Return slots for a step's operands, which are a shape and a dtype: two views where those of products and of
    extras differ.
    """
    if of_products == of_extras:
        return _swizzled(*of_products)
    views = _swizzled(*of_products), _swizzled(*of_extras)
    # race detection takes all slots of a union for one: interpreted, the views are slots of their own
    return plgpu.RefUnion(*views) if interpret is None else views


def lora_gemm(
    products,
    shrinks=(),
    extras=(),
    *,
    bias=None,
    scales=None,
    unit=None,
    softmax=None,
    transposed=False,
    config=DEFAULT,
    interpret=None,
):
    """Compute Σ x·W + Σ u·E + bias per job (transposed: Σ x·Wᵀ + Σ u·E) in one accumulator.

    Args:
      products: pairs x [J, T, K] and w [K, N] (transposed: [N, K]); K may differ between pairs.
      shrinks: `Shrink`s of at most 128 ranks each, one a product at most. extras: `Extra`s. bias: [N] or None.
      unit: `Unit`, which makes two or three results in place of one. softmax: `Softmax`, which makes two.
      scales: `Scales` where x and w are 8-bit numbers, which takes `transposed`, no shrinks, and K of multiples of 128.
      All else of one 16-bit dtype; T a multiple of 8; K, N multiples of 64; ranks of arrays multiples of 8, and of 64
      above 64.

    Returns:
      (out, us): [J, T, N] in that dtype, rounded once from float32, or those of the unit, or the exponentials and
      their sums [J, tiles of N, rows of whole tiles] in float32; and the arrays [J, T, R] of the shrinks.
    """
    (jobs, tokens, _), left = products[0][0].shape, products[0][0].dtype
    dtype, depth = scales.dtype if scales else left, STEP_BYTES // left.itemsize  # of a step of the products
    if scales and (shrinks or not transposed or any(x.shape[-1] % depth for x, _ in products)):
        raise ValueError(f"8-bit products are transposed, of K in multiples of {depth}, without shrinks")
    if unit and (scales or softmax or (unit.up is not None and not transposed)):
        raise ValueError(
            "a unit is made of 16-bit products, its gradient of transposed ones, and no softmax of it"
        )
    n = products[0][1].shape[0 if transposed else 1]
    made = [rank for shrink in shrinks for rank in shrink.parts]
    if any(sum(shrink.parts) != shrink.a.shape[1] for shrink in shrinks):
        raise ValueError("the arrays of a shrink have other ranks than its A")
    if len(shrinks) > 1 and len(made) > len(shrinks):
        raise ValueError("several shrinks make one array each")
    widths = [shrink_width(shrink.parts) for shrink in shrinks]
    width = max(widths, default=0)  # of the one accumulator that serves a leader's shrinks in turn
    if width > MAX_SHRINK:
        raise ValueError(f"the shrinks take {widths} columns; {MAX_SHRINK} is the most")
    piece = piece_width(made) if shrinks else 0
    c, a_stages = fit_shared(config, width, piece)
    job_tiles = pl.cdiv(tokens, TILE_M)
    m_groups, n_tiles = pl.cdiv(jobs * job_tiles, c.cluster), pl.cdiv(n, c.tile_n)
    clusters = c.sms // c.cluster
    leaders = m_groups if shrinks else 0
    k_steps = [pl.cdiv(x.shape[-1], depth) for x, _ in products]
    e_steps = [pl.cdiv(made[u] if isinstance(u, int) else u.shape[2], PIECE) for u, *_ in extras]
    steps = sum(k_steps) + sum(e_steps)
    shrink_of = {shrink.product: s for s, shrink in enumerate(shrinks)}
    stored = min(c.tile_n, n)  # columns; what is stored beyond a result of one piece would land in it
    unit_steps = stored // PIECE if unit else 0
    per_tile = steps + unit_steps
    *starts, _ = itertools.accumulate(k_steps, initial=0)
    *a_starts, a_steps = itertools.accumulate(
        (k if p in shrink_of else 0 for p, k in enumerate(k_steps)), initial=0
    )
    # what slots hold, of products and of extras
    w_tile = (c.tile_n, depth) if transposed else (depth, c.tile_n)
    x_kinds = ((c.stages, TILE_M, depth), left), ((c.stages, TILE_M, PIECE), dtype)
    w_kinds = ((c.stages, *w_tile), products[0][1].dtype), ((c.stages, PIECE, c.tile_n), dtype)
    outs = (3 if unit.again else 2) if unit else 2 if softmax else 1
    awaited = any(isinstance(extra.u, int) for extra in extras)
    flags = bool(shrinks) and interpret is None
    if shrinks and not flags and clusters != 1:
        raise ValueError("interpretation knows no flags between blocks: shrinks need sms == cluster")
    # these are read by plain loads, which nothing guards beyond the end
    u_scales = [jnp.pad(s.scale, ((0, 0), (0, width - s.scale.shape[1]))) for s in shrinks]
    beyond = (0, n_tiles * c.tile_n - n)
    bias = None if bias is None else jnp.pad(bias, beyond)
    beyond_rows = ((0, 0), (0, job_tiles * TILE_M - tokens))
    shift = jnp.pad(softmax.shift, beyond_rows) if softmax else None
    if scales:
        rows = jnp.pad(scales.rows, beyond_rows)
        columns = None if scales.columns is None else jnp.pad(scales.columns, beyond)
    operands = (
        [x for x, _ in products],
        [w for _, w in products],
        [s.a for s in shrinks],
        jnp.stack(u_scales) if shrinks else None,
        [None if isinstance(extra.u, int) else extra.u for extra in extras],
        [extra.e for extra in extras],
        bias,
        (rows, columns) if scales else None,
        (unit.gate, unit.up) if unit else None,
        shift,
    )
    flat, tree = jax.tree.flatten(operands)

    def body(*refs):
        x_refs, w_refs, a_refs, u_scale_ref, u_refs, e_refs, bias_ref, scale_refs, unit_refs, shift_ref = (
            tree.unflatten(refs[: len(flat)])
        )
        out_refs, su_refs = refs[len(flat) : len(flat) + outs], refs[len(flat) + outs :]
        u_refs = [su_refs[extra.u] if u is None else u for extra, u in zip(extras, u_refs, strict=True)]

        def scope(x_smem, w_smem, out_smem, full, free, a_smem, u_smem, a_full, a_free, u_done):
            # the slots as steps of products see them, and as steps of extras do
            x_base, x_extra = (x_smem, x_smem) if x_kinds[0] == x_kinds[1] else x_smem
            w_base, w_extra = (w_smem, w_smem) if w_kinds[0] == w_kinds[1] else w_smem
            wg, rank, me = lax.axis_index("wg"), lax.axis_index("cluster"), lax.axis_index("sm")
            if flags:
                ready = pl.get_global(plgpu.SemaphoreType.REGULAR((m_groups * c.cluster,)))

            def mod(step, ring):
                return lax.rem(step, jnp.int32(ring))

            def share(total):
                return lax.div(total - me + (clusters - 1), jnp.int32(clusters))

            leader_count, tile_count = share(leaders), share(m_groups * n_tiles)

            def walk(on_tile):
                """Visit this cluster's tiles, leaders first; on_tile(i, leads, row tile, job, row, column)."""
                skipped = 1 if shrinks else 0
                grid, minor = (m_groups, max(n_tiles - skipped, 1)), 1 if c.minor_n else 0

                @pl.loop(0, tile_count)
                def _visit(i):
                    at, leads = i * clusters + me, i < leader_count
                    m_group, n_index = plgpu.planar_snake(at - leaders, grid, minor, c.band)
                    m_group, n_index = jnp.where(leads, at, m_group), jnp.where(leads, 0, n_index + skipped)
                    index = m_group * c.cluster + rank
                    row = mod(index, job_tiles) * TILE_M
                    on_tile(i, leads, index, lax.div(index, jnp.int32(job_tiles)), row, n_index * c.tile_n)

            @pl.when(wg == WGS)
            def _feed():
                plgpu.set_max_registers(40, action="decrease")

                def fill(step, left, right, x_slots, w_slots, multicast=False):
                    slot = mod(step, c.stages)
                    pl.when(step >= c.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(left, x_slots.at[slot], full.at[slot])
                    axes = {"collective_axes": "cluster"} if multicast and c.cluster > 1 else {}
                    plgpu.copy_gmem_to_smem(right, w_slots.at[slot], full.at[slot], **axes)

                def fill_a(step, s, job, depths):
                    slot = mod(step, a_stages)
                    pl.when(step >= a_stages)(lambda: plgpu.barrier_wait(a_free.at[slot]))
                    source = a_refs[s].at[job, pl.ds(0, width), depths]
                    plgpu.copy_gmem_to_smem(source, a_smem.at[slot], a_full.at[slot])

                def on_tile(i, leads, index, job, row, column):
                    rows, columns = pl.ds(row, TILE_M), pl.ds(column, c.tile_n)
                    for p, (x_ref, w_ref, count) in enumerate(zip(x_refs, w_refs, k_steps, strict=True)):

                        @pl.loop(0, count)
                        def _base(k, p=p, x_ref=x_ref, w_ref=w_ref):
                            depths = pl.ds(k * depth, depth)
                            right = w_ref.at[columns, depths] if transposed else w_ref.at[depths, columns]
                            step, a_step = i * per_tile + starts[p] + k, i * a_steps + a_starts[p] + k
                            fill(step, x_ref.at[job, rows, depths], right, x_base, w_base, multicast=True)
                            if p in shrink_of:
                                pl.when(leads)(lambda: fill_a(a_step, shrink_of[p], job, depths))

                    if awaited:
                        pl.when(leads)(lambda: plgpu.barrier_wait(u_done))
                    if awaited and flags:
                        pl.when(~leads)(lambda: pl.semaphore_wait(ready.at[index], WGS, decrement=False))
                    first = i * per_tile + sum(k_steps)
                    for extra, u_ref, e_ref, count in zip(extras, u_refs, e_refs, e_steps, strict=True):

                        @pl.loop(0, count)
                        def _extra(i, extra=extra, u_ref=u_ref, e_ref=e_ref, first=first):
                            u = u_ref.at[job, rows, pl.ds(i * PIECE, PIECE)]
                            e = e_ref.at[job, pl.ds(extra.row + i * PIECE, PIECE), columns]
                            fill(first + i, u, e, x_extra, w_extra)

                        first += count

                    if unit:
                        gate_ref, up_ref = unit_refs

                        @pl.loop(0, unit_steps)
                        def _unit(k, first=first):
                            piece = pl.ds(column + k * PIECE, PIECE)
                            if up_ref is None:
                                halves = [half * ROWS for half in range(WGS)]
                                parts = [gate_ref.at[job, pl.ds(row + half, ROWS), piece] for half in halves]
                                fill(first + k, *parts, *(x_base.at[:, pl.ds(half, ROWS)] for half in halves))
                            else:
                                parts = [ref.at[job, rows, piece] for ref in unit_refs]
                                fill(first + k, *parts, x_base, w_base.at[:, pl.ds(0, TILE_M)])

                walk(on_tile)

                def drain(total, ring, barrier):
                    @pl.loop(0, ring)
                    def _drain(i):
                        step = total - ring + i
                        pl.when(step >= 0)(lambda: plgpu.barrier_wait(barrier.at[mod(step, ring)]))

                # a block must not leave while its peer may still signal it
                drain(tile_count * per_tile, c.stages, free)
                if shrinks:
                    drain(leader_count * a_steps, a_stages, a_free)

            @pl.when(wg < WGS)
            def _multiply():
                plgpu.set_max_registers(232, action="increase")
                my_rows = pl.ds(wg * ROWS, ROWS)

                def multiply(acc, first, count, second=None, extra=False):
                    """Accumulate steps of the ring; `second` = (accumulator, first step) takes those of A."""
                    x_slots, w_slots = (x_extra, w_extra) if extra else (x_base, w_base)

                    @pl.loop(0, count)
                    def _step(k):
                        slot = mod(first + k, c.stages)
                        plgpu.barrier_wait(full.at[slot])
                        left, right = x_slots.at[slot, my_rows], w_slots.at[slot]
                        if second is not None:  # first, so that the long product hides its latency
                            a_acc, first_a = second
                            a_slot = mod(first_a + k, a_stages)
                            plgpu.barrier_wait(a_full.at[a_slot])
                            plgpu.wgmma(a_acc, left, a_smem.at[a_slot].transpose((1, 0)))
                        across = transposed and not extra
                        plgpu.wgmma(acc, left, right.transpose((1, 0)) if across else right)
                        plgpu.wgmma_wait(0)  # the other warpgroup keeps the tensor cores busy meanwhile
                        plgpu.barrier_arrive(free.at[slot])
                        if second is not None:
                            plgpu.barrier_arrive(a_free.at[a_slot])

                def vector(ref):
                    """Load one number per column, to be applied to an accumulator."""
                    row = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    return lax.broadcast_in_dim(row.astype(jnp.float32), (ROWS, row.shape[0]), [1])

                def send(n, piece, which, targets, buffer):
                    """Let the n-th of the pieces that take turns in a buffer leave for one of the targets."""
                    slots = buffer.shape[1]
                    plgpu.wait_smem_to_gmem(slots - 1 if n else 0, wait_read_only=True)
                    buffer[wg, n % slots] = piece.astype(dtype)
                    plgpu.commit_smem()
                    copy = functools.partial(plgpu.copy_smem_to_gmem, buffer.at[wg, n % slots])
                    lax.switch(which, [functools.partial(copy, target) for target in targets])

                def store(total, job, row, column):
                    rows = pl.ds(row + wg * ROWS, ROWS)
                    for k in range(total.shape[1] // PIECE):
                        target = out_refs[0].at[job, rows, pl.ds(column + k * PIECE, PIECE)]
                        send(k, total[:, k * PIECE : (k + 1) * PIECE], 0, [target], out_smem)

                def store_u(u, s, job, row):
                    """Store what a shrink made: of several its one array, of an only one each of its arrays."""
                    rows = pl.ds(row + wg * ROWS, ROWS)
                    if len(shrinks) == 1:
                        starts = itertools.accumulate(made[:-1], initial=0)
                        parts = zip(su_refs, starts, made, strict=True)
                        which = 0
                        pieces = [
                            ([ref], at + k, k) for ref, at, rank in parts for k in range(0, rank, piece)
                        ]
                    else:
                        which, pieces = s, [(su_refs, k, k) for k in range(0, width, piece)]
                    for n, (refs, at, k) in enumerate(pieces):
                        # from a traced 0: static slices may not reach beyond the narrower ones' ranks
                        targets = [ref.at[job, rows, pl.ds(me * 0 + k, piece)] for ref in refs]
                        send(n, u[:, at : at + piece], which, targets, u_smem or out_smem)

                def store_unit(total, first, job, row, column):
                    """Read gate, and up, from the ring behind the products' steps, and store what becomes of them."""
                    rows = pl.ds(row + wg * ROWS, ROWS)
                    for k in range(unit_steps):
                        slot, own = mod(first + k, c.stages), total[:, k * PIECE : (k + 1) * PIECE]
                        plgpu.barrier_wait(full.at[slot])
                        load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA)
                        gate = load(x_base.at[slot, my_rows]).astype(jnp.float32)
                        if unit.up is not None:
                            up = load(w_base.at[slot, my_rows]).astype(jnp.float32)
                        plgpu.commit_smem()  # what was read may be written by the copy engine
                        plgpu.barrier_arrive(free.at[slot])
                        if unit.up is None:
                            own = own.astype(dtype)
                            made = own, glu(unit.activation, gate, own.astype(jnp.float32))
                        else:
                            made = glu_back(unit.activation, gate, up, own)
                            if outs == 3:
                                made = *made, glu(unit.activation, gate, up)
                        for at, (piece, ref) in enumerate(zip(made, out_refs, strict=True)):
                            target = ref.at[job, rows, pl.ds(column + k * PIECE, PIECE)]
                            send(k * outs + at, piece, 0, [target], out_smem)

                def of_rows(ref, job, row):
                    """Load one number per row, to be applied to an accumulator."""
                    # the last cluster may hold a row tile beyond the last job
                    at = ref.at[jnp.minimum(job, jobs - 1), pl.ds(row + wg * ROWS, ROWS)]
                    own = plgpu.load(at, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                    return lax.broadcast_in_dim(own, (ROWS, c.tile_n), [0])

                def store_softmax(total, shifts, job, row, column):
                    (out_ref, sum_ref), sums, cap = out_refs, 0.0, softmax.softcap
                    for k in range(0, stored, PIECE):
                        own, slope = total[:, k : k + PIECE], 1.0
                        if cap:
                            tanh = 1 - 2 / (1 + jnp.exp(own * (2 / cap)))  # the chip's own is good to 1e-3
                            own, slope = cap * tanh, 1 - tanh * tanh
                        e = jnp.exp(jnp.minimum(own - shifts[:, k : k + PIECE], CAP))
                        inside = jnp.where(column + k < n, jnp.float32(1), jnp.float32(0))
                        sums += inside * jnp.sum(e, axis=1)
                        target = out_ref.at[job, pl.ds(row + wg * ROWS, ROWS), pl.ds(column + k, PIECE)]
                        send(k // PIECE, e * slope, 0, [target], out_smem)

                    @pl.when(job < jobs)  # nothing cuts off plain stores
                    def _store_sums():
                        sum_ref[job, lax.div(column, c.tile_n), pl.ds(row + wg * ROWS, ROWS)] = sums

                def pick(values, p):
                    """Return values[p] of a traced p."""
                    return sum(jnp.where(p == at, jnp.int32(value), 0) for at, value in enumerate(values))

                def lead(acc, i, index, job, row):
                    """Run a leader's products, with its shrinks."""

                    def shrink(p):
                        first, first_a = i * per_tile + pick(starts, p), i * a_steps + pick(a_starts, p)
                        s = pick([shrink_of.get(at, 0) for at in range(len(products))], p)

                        def run(a_acc):
                            multiply(acc, first, pick(k_steps, p), (a_acc, first_a))
                            return a_acc[...]

                        u = pl.run_scoped(run, plgpu.ACC((ROWS, width), jnp.float32))
                        # the last cluster may hold a row tile beyond the last job
                        u *= vector(u_scale_ref.at[s, jnp.minimum(job, jobs - 1)])
                        store_u(u, s, job, row)

                    for shrinking, group in itertools.groupby(range(len(products)), shrink_of.__contains__):
                        ps = list(group)
                        if shrinking:
                            pl.loop(ps[0], ps[-1] + 1)(shrink)
                        else:
                            multiply(acc, i * per_tile + starts[ps[0]], sum(k_steps[p] for p in ps))
                    if awaited:
                        plgpu.wait_smem_to_gmem(0)
                        plgpu.barrier_arrive(u_done)
                        if flags:
                            pl.semaphore_signal(ready.at[index])

                def on_tile(i, leads, index, job, row, column):
                    def run(acc):
                        done = 0
                        if shrinks:
                            pl.when(leads)(lambda: lead(acc, i, index, job, row))
                            done = jnp.where(leads, jnp.int32(sum(k_steps)), 0)
                        if transposed:
                            multiply(acc, i * per_tile + done, sum(k_steps) - done)
                            multiply(acc, i * per_tile + sum(k_steps), sum(e_steps), extra=True)
                        else:
                            multiply(acc, i * per_tile + done, steps - done)
                        return acc[...]

                    total = pl.run_scoped(run, plgpu.ACC((ROWS, c.tile_n), jnp.float32))
                    if scales:
                        row_scales, column_scales = scale_refs
                        total *= of_rows(row_scales, job, row)
                        if column_scales is not None:
                            total *= vector(column_scales.at[pl.ds(column, c.tile_n)])
                    if bias_ref is not None:
                        total += vector(bias_ref.at[pl.ds(column, c.tile_n)])
                    if unit:
                        store_unit(total, i * per_tile + steps, job, row, column)
                    elif softmax:
                        store_softmax(total, of_rows(shift_ref, job, row), job, row, column)
                    else:
                        store(total[:, :stored], job, row, column)

                walk(on_tile)
                plgpu.wait_smem_to_gmem(0)

        arrivals = {"num_arrivals": WGS, "num_barriers": c.stages}
        pl.run_scoped(
            scope,
            x_smem=_ring(*x_kinds, interpret),
            w_smem=_ring(*w_kinds, interpret),
            out_smem=_swizzled((WGS, c.out_slots, ROWS, PIECE), dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            free=plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)
            if c.cluster > 1
            else plgpu.Barrier(**arrivals),
            a_smem=_swizzled((a_stages, width, PIECE), dtype) if shrinks else None,
            u_smem=_swizzled((WGS, 1, ROWS, piece), dtype) if 0 < piece < PIECE else None,
            a_full=plgpu.Barrier(num_barriers=a_stages) if shrinks else None,
            a_free=plgpu.Barrier(num_arrivals=WGS, num_barriers=a_stages) if shrinks else None,
            u_done=plgpu.Barrier(num_arrivals=WGS) if shrinks else None,
            collective_axes="wg",
        )

    out_types = [jax.ShapeDtypeStruct((jobs, tokens, n), dtype)] * outs
    if softmax:
        out_types[1] = jax.ShapeDtypeStruct((jobs, n_tiles, job_tiles * TILE_M), jnp.float32)
    results = plgpu.kernel(
        body,
        out_type=out_types + [jax.ShapeDtypeStruct((jobs, tokens, rank), dtype) for rank in made],
        grid=(clusters,),
        grid_names=("sm",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=WGS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True) if unit or softmax else None,
        interpret=interpret,
    )(*flat)
    results = vary_like(products[0][0], results)
    return results[0] if outs == 1 else tuple(results[:outs]), tuple(results[outs:])


def vary_like(operand, results):
    """Let results vary over the axes of a shard_map that an operand does: a launch does not say so of its results."""
    axes = tuple(sorted(jax.typeof(operand).manual_axis_type.varying))
    return [lax.pcast(result, axes, to="varying") for result in results] if axes else results
