"""A slot's next examples, and how they lie in a micro-step's sequences: pure functions of its cursor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from plora_jax.data.examples import Examples
from plora_jax.data.order import order
from plora_jax.data.shapes import Shape, load, spread
from plora_jax.jobs import Job


def steps_per_epoch(n_rows: int, batch_size: int) -> int:
    """Count an epoch's optimizer steps; the last, partial batch is one."""
    return math.ceil(n_rows / batch_size)


def total_steps(job: Job, n_rows: int) -> int:
    """Count a job's optimizer steps on n rows left after filtering, as transformers' Trainer does.

    `max_steps` wins over `epochs`; a fractional number of epochs rounds its steps up.
    """
    if job.max_steps is not None:
        return job.max_steps
    return math.ceil(job.epochs * steps_per_epoch(n_rows, job.batch_size))


@dataclass(frozen=True)
class Slot:
    """Configure what a slot reads: a job's data, batch size, data seed and number of optimizer steps."""

    examples: Examples
    batch_size: int
    data_seed: int
    steps: int

    @staticmethod
    def of(job: Job, examples: Examples) -> "Slot":
        """Read the slot's fields off a job."""
        return Slot(examples, job.batch_size, job.data_seed, total_steps(job, len(examples)))


class Cursor(NamedTuple):
    """Say where a slot stands: in `epoch`, `offset` rows of it taken, `step` optimizer steps closed."""

    epoch: int = 0
    offset: int = 0
    step: int = 0


@lru_cache(maxsize=64)
def _order(data_seed: int, epoch: int, n: int) -> np.ndarray:
    rows = order(data_seed, epoch, n)
    rows.setflags(write=False)
    return rows


def pending(slot: Slot, cursor: Cursor, group: int) -> np.ndarray:
    """Return the rows up to the next multiple of `group` (of the batch size: the rest of the open batch).

    Counting in multiples keeps slots of unlike batch sizes in lockstep even after a group had to be split.
    """
    n = len(slot.examples)
    end = min(n, (cursor.offset // group + 1) * group)
    return _order(slot.data_seed, cursor.epoch, n)[cursor.offset : end]


def advance(slot: Slot, cursor: Cursor, taken: int) -> tuple[Cursor, bool]:
    """Move the cursor over `taken` rows; return it and whether that closes the optimizer batch."""
    n, offset = len(slot.examples), cursor.offset + taken
    closes = offset == n or offset % slot.batch_size == 0
    step = cursor.step + closes
    return (Cursor(cursor.epoch + 1, 0, step) if offset == n else Cursor(cursor.epoch, offset, step)), closes


def fitting(slot: Slot, rows: np.ndarray, m: int, fill: bool, shape: Shape) -> int:
    """Count how many of the first `rows` fit m sequences of `shape` (0 when not even the first does)."""
    lengths, counts = slot.examples.lengths[rows], slot.examples.counts[rows]
    if not fill:
        fits = (lengths[:m] <= shape.S) & (counts[:m] <= shape.P)
        return int(fits.size if fits.all() else fits.argmin())
    if m == 1:
        fits = (lengths.cumsum() <= shape.S) & (counts.cumsum() <= shape.P)
        return int(fits.size if fits.all() else fits.argmin())
    taken = 0
    while taken < len(rows):
        need = load(lengths[: taken + 1], counts[: taken + 1], m, fill)
        if need.S > shape.S or need.P > shape.P:
            break
        taken += 1
    return taken


def choose(
    slots: Mapping[int, Slot],
    rows: Mapping[int, np.ndarray],
    m: int,
    fill: bool,
    shapes: Sequence[Shape],
    apart: bool,
) -> tuple[Shape, dict[int, int]]:
    """Return a micro-step's shape and how many of its pending rows each slot takes.

    In lockstep that is the first shape that holds them all; out of it (`apart`), or when none does, the shape
    whose positions are put to best use, each slot taking what fits. Every slot takes at least one row.
    """
    best: tuple[float, Shape, dict[int, int]] | None = None
    for shape in shapes:
        taken = {j: fitting(s, rows[j], m, fill, shape) for j, s in slots.items()}
        if not all(taken.values()):
            continue
        if not apart and all(taken[j] == len(rows[j]) for j in slots):
            return shape, taken
        real = sum(int(s.examples.lengths[rows[j][: taken[j]]].sum()) for j, s in slots.items())
        share = real / (shape.S * m * len(slots))
        if best is None or share > best[0]:
            best = share, shape, taken
    assert best is not None  # the loader refuses data whose longest row does not fit the last shape
    return best[1], best[2]


class Block(NamedTuple):
    """Hold one slot's part of a batch, int32: [m, S] tokens, positions, rows; [m, P] trained, targets."""

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    trained: np.ndarray
    targets: np.ndarray


def blank(m: int, shape: Shape) -> Block:
    """Return a slot's part with padding alone."""
    whole, heads = (m, shape.S), (m, shape.P)
    return Block(
        np.zeros(whole, np.int32),
        np.zeros(whole, np.int32),
        np.full(whole, -1, np.int32),
        np.zeros(heads, np.int32),
        np.full(heads, -1, np.int32),
    )


def lay_out(examples: Examples, rows: np.ndarray, m: int, fill: bool, shape: Shape) -> Block:
    """Place the examples `rows`: positions restart at each, `rows` tells them apart, labels stay inside each.

    An example's labels are predicted from its own positions alone: nothing is trained across a border.
    """
    block = blank(m, shape)
    at, heads_at = [0] * m, [0] * m
    for b, row in zip(spread(examples.lengths[rows], m, fill).tolist(), rows.tolist(), strict=True):
        tokens, heads = examples.tokens[row], examples.heads[row]
        s, p = at[b], heads_at[b]
        at[b], heads_at[b] = s + len(tokens), p + len(heads)
        block.tokens[b, s : at[b]] = tokens
        block.positions[b, s : at[b]] = np.arange(len(tokens), dtype=np.int32)
        block.rows[b, s : at[b]] = row
        block.trained[b, p : heads_at[b]] = heads + s
        block.targets[b, p : heads_at[b]] = examples.targets[row]
    return block
