"""Hopper kernel: round rows to 8 bits, or a gated linear unit of them, reading each once.

A block takes a row: the copy engine brings it into shared memory, where warpgroups look for the largest number, piece
by piece, and then multiply by the scale and write. XLA reads rows twice for this, and slower than the memory gives
them (docs/benchmarks.md).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import fp8
from .fp8 import Rounded, row_scale
from .glu import glu, glu_back
from .hopper_gemm import vary_like
from .tiles import SHARED_BYTES

LANES = 128  # of a warpgroup
PIECE = 4 * LANES  # numbers that a warpgroup takes at once, at most
AT_ONCE = 4  # pieces whose columns are on their way from memory together
BOX = 256  # of an axis, at most, in one copy
MOST_WGS = 4  # of a block
BUSY_WGS = 8  # warpgroups of all blocks of a multiprocessor, to hide what each waits for


def round_rows(xs, columns, dtype, *, interpret=None):
    """Round x·column of several arrays to an 8-bit format with one scale a row for all of them, as `fp8.round_rows`.

    Args:
      xs: 16-bit arrays [..., D] alike but for D, multiples of 128. columns: one [D] each, or None.
      dtype: float8_e4m3fn or float8_e5m2.

    Returns:
      (values, one [..., D] in `dtype` for each x; scale [...] in float32).
    """
    if not rows_fit(xs):
        return fp8.round_rows(xs, columns, dtype)
    _, values, scale = _launch(xs, columns, dtype, None, interpret)
    return values, scale


def round_glu(activation, gate, up, *, interpret=None) -> Rounded:
    """Compute activation(gate)·up and round it, as `fp8.round_glu`; arrays as for `round_rows`."""
    if not rows_fit((gate, up)):
        return fp8.round_glu(activation, gate, up)

    def unit(gate, up):
        return (glu(activation, gate, up),)

    (h,), (values,), scale = _launch((gate, up), (None,), jnp.float8_e4m3fn, unit, interpret)
    return Rounded(h, values, scale[..., None])


def round_glu_back(activation, gate, up, dh, columns, dtype, *, interpret=None):
    """Compute and round the gradients of gate and up, as `fp8.round_glu_back`; arrays as for `round_rows`."""
    if not rows_fit((gate, up, dh)):
        return fp8.round_glu_back(activation, gate, up, dh, columns, dtype)
    gradients, values, scale = _launch(
        (gate, up, dh), columns, dtype, functools.partial(glu_back, activation), interpret
    )
    return gradients, (values, scale)


def rows_fit(xs) -> bool:
    """Say whether there are rows, and one of each array fits in shared memory, all together."""
    return xs[0].size > 0 and _row_bytes(xs) <= SHARED_BYTES


def _row_bytes(xs) -> int:
    """Return what a block of the most warpgroups takes of shared memory, where every array begins on a KiB."""
    return sum(-(-2 * x.shape[-1] // 1024) * 1024 for x in xs) + MOST_WGS * 4 * PIECE


class _Result(NamedTuple):
    """What is rounded: the references of one array."""

    column: Any  # [D / LANES, LANES], or None
    made: Any  # [rows, D / LANES, LANES]: before it is rounded, or None
    values: Any  # as `made`, rounded
    held: Any  # [D / LANES, LANES]: a row before it is rounded, in shared memory


def _launch(xs, columns, dtype, function, interpret):
    """Round `function` of pieces of xs in float32, whose results take the place of as many xs; None: xs themselves.

    Returns:
      (results [..., D] in the dtype of xs, or those of None: none; values; scale [...]).
    """
    lead, kind, rows = xs[0].shape[:-1], xs[0].dtype, math.prod(xs[0].shape[:-1])
    lines = [x.shape[-1] // LANES for x in xs]
    vector = math.gcd(PIECE // LANES, *lines)  # numbers of a thread in a piece: 8 bytes at best
    layout = plgpu.Layout.WG_STRIDED((vector, LANES), vec_size=vector)
    wgs = min(MOST_WGS, pl.cdiv(BUSY_WGS, SHARED_BYTES // _row_bytes(xs)))
    flat, tree = jax.tree.flatten(
        (
            [x.reshape(rows, -1, LANES) for x in xs],
            [None if column is None else column.reshape(-1, LANES) for column in columns],
        )
    )
    made_lines = lines[: len(columns)]
    results = (
        [jax.ShapeDtypeStruct((rows, n, LANES), kind) for n in made_lines if function],
        [jax.ShapeDtypeStruct((rows, n, LANES), dtype) for n in made_lines],
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    flat_results, results_tree = jax.tree.flatten(results)
    copies = [(at, start, min(BOX, n - start)) for at, n in enumerate(lines) for start in range(0, n, BOX)]

    def rounding(*refs):
        x_refs, column_refs = tree.unflatten(refs[: len(flat)])
        made_refs, value_refs, scale_ref = results_tree.unflatten(refs[len(flat) :])

        def scope(held, arrived, tops, looked):
            row, wg = lax.axis_index("row"), lax.axis_index("wg")

            @pl.when(wg == 0)
            def _fill():
                for at, start, size in copies:
                    part = pl.ds(start, size)
                    plgpu.copy_gmem_to_smem(x_refs[at].at[row, part], held[at].at[part], arrived)

            plgpu.barrier_wait(arrived)
            own = [
                _Result(*refs)
                for refs in zip(
                    column_refs, made_refs or [None] * len(columns), value_refs, held, strict=False
                )
            ]
            # what is read together, and what is made of it
            groups = [(held, own)] if function else [([each.held], [each]) for each in own]

            def load(ref, piece):
                return plgpu.load(ref.at[piece], layout=layout, optimized=False)

            def load_columns(results, pieces):
                """Load all before any result is stored: for all LLVM knows, a store changes what is loaded after it."""
                return [
                    [None if each.column is None else load(each.column, piece) for each in results]
                    for piece in pieces
                ]

            def multiplied(x, column):
                wide = x.astype(jnp.float32)
                return wide if column is None else wide * column.astype(jnp.float32)

            def look(inputs, results, pieces, largest):
                read = [[load(ref, piece) for ref in inputs] for piece in pieces]
                for piece, made, factors in zip(pieces, read, load_columns(results, pieces), strict=True):
                    if function:
                        made = [y.astype(kind) for y in function(*(x.astype(jnp.float32) for x in made))]
                    for each, y, column in zip(results, made, factors, strict=True):
                        if function:
                            each.made[row, piece] = y
                            each.held[piece] = y
                        largest = jnp.maximum(largest, jnp.abs(multiplied(y, column)))
                return largest

            def write(_, results, pieces, factor):
                read = [[load(each.held, piece) for each in results] for piece in pieces]
                for piece, made, factors in zip(pieces, read, load_columns(results, pieces), strict=True):
                    for each, y, column in zip(results, made, factors, strict=True):
                        each.values[row, piece] = (multiplied(y, column) * factor).astype(dtype)
                return factor  # as `sweep` wants it

            def sweep(visit, carry):
                """Take this warpgroup's pieces of each group through `visit`: AT_ONCE together, then one by one."""
                for group in groups:
                    pieces = group[1][0].held.shape[0] // vector
                    turns = pieces // (AT_ONCE * wgs)

                    def turn(i, carry, count, first=0, group=group):
                        at = first + (i * wgs + wg) * count
                        return visit(*group, [pl.ds((at + k) * vector, vector) for k in range(count)], carry)

                    carry = lax.fori_loop(0, turns, functools.partial(turn, count=AT_ONCE), carry)
                    left = functools.partial(turn, count=1, first=turns * AT_ONCE * wgs)
                    mine = lax.div(pieces - turns * AT_ONCE * wgs - wg + (wgs - 1), jnp.int32(wgs))
                    carry = lax.fori_loop(0, mine, left, carry)
                return carry

            largest = sweep(look, plgpu.layout_cast(jnp.zeros((vector, LANES), jnp.float32), layout))
            if wgs > 1:  # all of them work out the same number: they share the scratch memory of a reduction
                tops[wg] = largest
                plgpu.commit_smem()
                plgpu.barrier_arrive(looked)
                plgpu.barrier_wait(looked)
                largest = functools.reduce(jnp.maximum, [load(tops, at) for at in range(wgs)])
            scale = row_scale(jnp.max(largest), dtype)
            sweep(write, 1 / scale)

            @pl.when(wg == 0)
            def _keep():
                scale_ref[row] = scale

        pl.run_scoped(
            scope,
            held=[plgpu.SMEM((n, LANES), kind) for n in lines],
            arrived=plgpu.Barrier(num_arrivals=len(copies)),
            tops=plgpu.SMEM((wgs, vector, LANES), jnp.float32) if wgs > 1 else None,
            looked=plgpu.Barrier(num_arrivals=wgs) if wgs > 1 else None,
            collective_axes="wg",
        )

    launch = plgpu.kernel(
        rounding,
        out_type=flat_results,
        grid=(rows,),
        grid_names=("row",),
        num_threads=wgs,
        thread_name="wg",
        # a thread reads what it wrote itself; the least scratch lets more rows fit
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=4 * LANES
        ),
        interpret=interpret,
    )
    with jax.named_scope("rounding"):
        out = vary_like(xs[0], launch(*flat))
    made, values, scale = results_tree.unflatten(out)
    joined = [[y.reshape(*lead, -1) for y in ys] for ys in (made, values)]
    return *joined, scale.reshape(lead)
