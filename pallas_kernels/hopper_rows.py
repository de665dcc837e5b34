"""Hopper kernel: round rows to 8 bits, reading each once.

A warpgroup takes a row: it reads it into shared memory on its way past the largest number, then multiplies what it
holds and writes it. XLA reads rows twice for this, and slower than the memory gives them (docs/benchmarks.md).
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .fp8 import row_scale
from .hopper_gemm import vary_like

LANES = 128  # of a warpgroup
AT_ONCE = 12  # pieces on their way from memory for each thread


def round_rows(xs, columns, dtype, *, interpret=None):
    """Round x·column of several arrays to an 8-bit format with one scale a row for all of them, as `fp8.round_rows`.

    Args:
      xs: 16-bit arrays [..., D] alike but for D, multiples of 128, that fit as `rows_fit` says: `choose` sees to both.
      columns: one [D] in float32 each, or None.
      dtype: float8_e4m3fn or float8_e5m2.

    Returns:
      (values, one [..., D] in `dtype` for each x; scale [...] in float32).
    """
    lead, sizes = xs[0].shape[:-1], [x.shape[-1] for x in xs]
    flat, tree = jax.tree.flatten(([x.reshape(-1, x.shape[-1]) for x in xs], list(columns)))
    vector = math.gcd(4 * LANES, *sizes) // LANES  # numbers of a thread in a piece: 8 bytes at best
    layout = plgpu.Layout.WG_STRIDED((vector * LANES,), vec_size=vector)

    def rounding(*refs):
        x_refs, column_refs = tree.unflatten(refs[: len(flat)])
        *value_refs, scale_ref = refs[len(flat) :]

        def load(ref, piece, *at):
            return plgpu.load(ref.at[(*at, piece)], layout=layout, optimized=False)

        def scope(held):
            row = lax.axis_index("row")

            def fetch(ref, column_ref, pieces, *at):
                """Load all pieces before any is stored: for all LLVM knows, a store changes what is loaded after it."""
                columns = [None if column_ref is None else load(column_ref, piece) for piece in pieces]
                return list(zip(pieces, [load(ref, piece, *at) for piece in pieces], columns, strict=True))

            def multiplied(x, column):
                wide = x.astype(jnp.float32)
                return wide if column is None else wide * column

            def look(x_ref, column_ref, held_ref, pieces, largest):
                for piece, x, column in fetch(x_ref, column_ref, pieces, row):
                    held_ref[piece] = x
                    largest = jnp.maximum(largest, jnp.abs(multiplied(x, column)))
                return largest

            def write(value_ref, column_ref, held_ref, pieces, factor):
                for piece, x, column in fetch(held_ref, column_ref, pieces):
                    value_ref[row, piece] = (multiplied(x, column) * factor).astype(dtype)
                return factor  # as `sweep` wants it

            def sweep(visit, refs, carry):
                """Take each array's pieces through `visit`, AT_ONCE together."""
                for size, *own in zip(sizes, *refs, strict=True):
                    turns, left = divmod(size // (vector * LANES), AT_ONCE)

                    def turn(i, carry, count=AT_ONCE, own=own):
                        starts = [(i * AT_ONCE + k) * vector * LANES for k in range(count)]
                        return visit(*own, [pl.ds(at, vector * LANES) for at in starts], carry)

                    carry = lax.fori_loop(0, turns, turn, carry) if turns else carry
                    carry = turn(turns, carry, left) if left else carry
                return carry

            nothing = plgpu.layout_cast(jnp.zeros((vector * LANES,), jnp.float32), layout)
            scale = row_scale(jnp.max(sweep(look, (x_refs, column_refs, held), nothing)), dtype)
            scale_ref[row] = scale
            sweep(write, (value_refs, column_refs, held), 1 / scale)

        pl.run_scoped(scope, [plgpu.SMEM((size,), xs[0].dtype) for size in sizes])

    rows = math.prod(lead)
    launch = plgpu.kernel(
        rounding,
        out_type=[jax.ShapeDtypeStruct((rows, size), dtype) for size in sizes]
        + [jax.ShapeDtypeStruct((rows,), jnp.float32)],
        grid=(rows,),
        grid_names=("row",),
        # a thread reads from shared memory what it wrote itself; the least scratch lets more rows fit
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=4 * LANES),
        interpret=interpret,
    )
    with jax.named_scope("rounding"):
        *values, scale = vary_like(xs[0], launch(*flat))
    return [value.reshape(*lead, -1) for value in values], scale.reshape(lead)
