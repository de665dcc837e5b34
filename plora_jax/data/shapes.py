"""The few static shapes (S positions, P trained positions) of a pack's micro-steps, chosen from the data."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from plora_jax.data.examples import Examples
from plora_jax.data.order import order

MAX_SHAPES = 16  # each is a program to compile


class Shape(NamedTuple):
    """Hold one static shape: S positions a sequence, of which P may be trained."""

    S: int
    P: int


def spread(lengths: Int64[np.ndarray, " k"], m: int, fill: bool) -> Int64[np.ndarray, " k"]:
    """Return the sequence (0 … m-1) of each of k examples: one each, or with `fill` balanced by length.

    With `fill` the longest goes first, each into the emptiest sequence (Graham 1969). Without it k ≤ m.
    """
    k = len(lengths)
    if not fill:
        return np.arange(k)
    if m == 1:
        return np.zeros(k, dtype=np.int64)
    loads, home = np.zeros(m, dtype=np.int64), np.empty(k, dtype=np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        home[i] = loads.argmin()
        loads[home[i]] += lengths[i]
    return home


def load(lengths: Int64[np.ndarray, " k"], counts: Int64[np.ndarray, " k"], m: int, fill: bool) -> Shape:
    """Return the least shape that holds k examples in m sequences: its fullest and its most trained one."""
    if fill and m == 1:
        return Shape(int(lengths.sum()), int(counts.sum()))
    if not fill:
        return Shape(int(lengths.max()), int(counts.max()))
    home = spread(lengths, m, fill)
    full = np.bincount(home, weights=lengths, minlength=m)
    trained = np.bincount(home, weights=counts, minlength=m)
    return Shape(int(full.max()), int(trained.max()))


def _round_up(x: np.ndarray, multiple: int) -> np.ndarray:
    return -(-x // multiple) * multiple


def split_lengths(loads: Int64[np.ndarray, " n"], limit: int, multiple: int = 8) -> list[int]:
    """Return at most `limit` multiples of `multiple` that pad `loads` least in total (dynamic programme)."""
    step = multiple
    while len(tops := np.unique(_round_up(loads, step))) > 512:
        step *= 2
    which = np.searchsorted(tops, loads)
    weight = np.cumsum(np.bincount(which, minlength=len(tops)))
    best = tops * weight  # padded tokens of one bucket over the first i+1 values, up to a constant
    cuts: list[np.ndarray] = []
    for _ in range(min(limit, len(tops)) - 1):
        # [i, h]: values 0…h keep the best so far, h+1…i share the bucket tops[i]
        cost = best[None, :] + tops[:, None] * (weight[:, None] - weight[None, :])
        cost = np.where(np.tri(len(tops), k=-1, dtype=bool), cost, np.iinfo(np.int64).max)
        cut = cost.argmin(axis=1)
        cut[0] = -1
        better = cost[np.arange(len(tops)), cut] < best
        cuts.append(np.where(better, cut, -1))
        best = np.where(better, cost[np.arange(len(tops)), cut], best)
    chosen, at = [len(tops) - 1], len(tops) - 1
    for cut in reversed(cuts):
        if cut[at] >= 0:
            at = int(cut[at])
            chosen.append(at)
    return sorted(int(tops[i]) for i in chosen)


def choose_shapes(
    data: Sequence[tuple[Examples, int]],
    m: int,
    *,
    group: int | None = None,
    fill: bool = False,
    refill: bool = False,
    limit: int = MAX_SHAPES,
    multiple: int = 8,
) -> tuple[Shape, ...]:
    """Choose at most `limit` shapes for jobs on `data` ((examples, data seed) pairs) that run in lockstep.

    A micro-step takes `group` (default m) examples a slot into m sequences. The lengths pad epoch 0's loads
    least; P is the most trained positions of any load that short. Every single example fits the last shape.
    With `refill` half of the shapes suit slots out of lockstep: they are chosen for single examples.
    """
    group = group or m
    unique = {(e.digest, seed): (e, seed) for e, seed in data}
    singles = np.concatenate([np.stack([e.lengths, e.counts], axis=1) for e, _ in unique.values()])
    loads = (
        singles
        if group == 1
        else np.array([n for e, seed in unique.values() for n in _loads(e, seed, m, group, fill)])
    )
    if refill and group > 1:
        tops = split_lengths(loads[:, 0], limit - limit // 2, multiple)
        tops = sorted({*tops, *split_lengths(singles[:, 0], limit // 2, multiple)})
    else:
        tops = split_lengths(loads[:, 0], limit, multiple)
    every = np.concatenate([loads, singles])
    most = [int(every[every[:, 0] <= S, 1].max()) for S in tops]
    return tuple(Shape(S, min(S, P if P <= 8 else -(-P // 8) * 8)) for S, P in zip(tops, most, strict=True))


def _loads(examples: Examples, seed: int, m: int, group: int, fill: bool) -> list[Shape]:
    rows = order(seed, 0, len(examples))
    pieces = (rows[i : i + group] for i in range(0, len(rows), group))
    return [load(examples.lengths[p], examples.counts[p], m, fill) for p in pieces]
