"""A slot's next examples, and how they lie in a micro-step's sequences: pure functions of its cursor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

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
    """Say where a slot stands: its open batch starts at `offset` in the order of `epoch`.

    `step` optimizer steps are closed; bit i of `taken` is set once row i of the open batch is handed out.
    """

    epoch: int = 0
    offset: int = 0
    step: int = 0
    taken: int = 0

    @property
    def place(self) -> tuple[int, int] | None:
        """Give (epoch, rows handed out of it), or None when they were not handed out in order."""
        in_order = self.taken & (self.taken + 1) == 0
        return (self.epoch, self.offset + self.taken.bit_count()) if in_order else None


@lru_cache(maxsize=64)
def _order(data_seed: int, epoch: int, n: int) -> np.ndarray:
    rows = order(data_seed, epoch, n)
    rows.setflags(write=False)
    return rows


def open_batch(slot: Slot, cursor: Cursor) -> Int64[np.ndarray, " k"]:
    """Return the rows of the slot's open optimizer batch; the last one of an epoch may be short."""
    rows = _order(slot.data_seed, cursor.epoch, len(slot.examples))
    return rows[cursor.offset : cursor.offset + slot.batch_size]


def pending(slot: Slot, cursor: Cursor, group: int | None) -> Int64[np.ndarray, " k"]:
    """Return which rows of the open batch (indices into it) are next: those not taken yet.

    With `group` only those up to the next multiple of it: counted so, slots of unlike batch sizes stay in
    lockstep even after a group had to be split.
    """
    size = min(slot.batch_size, len(slot.examples) - cursor.offset)
    if group is None:
        return np.array([i for i in range(size) if not cursor.taken >> i & 1], dtype=np.int64)
    done = cursor.taken.bit_count()
    return np.arange(done, min(size, (done // group + 1) * group))


def advance(slot: Slot, cursor: Cursor, took: Int64[np.ndarray, " k"]) -> tuple[Cursor, bool]:
    """Move the cursor over rows `took` of the open batch; return it and whether that closes the batch."""
    n = len(slot.examples)
    size = min(slot.batch_size, n - cursor.offset)
    taken = cursor.taken | sum(1 << int(i) for i in took)
    if taken.bit_count() < size:
        return cursor._replace(taken=taken), False
    epoch, offset = divmod(cursor.offset + size, n)
    return Cursor(cursor.epoch + epoch, offset, cursor.step + 1), True


def leading(
    lengths: Int64[np.ndarray, " k"], counts: Int64[np.ndarray, " k"], m: int, fill: bool, shape: Shape
) -> Int64[np.ndarray, " k"]:
    """Return the longest prefix of the examples, as indices, that fits m sequences of `shape`."""
    for k in range(len(lengths) if fill else min(m, len(lengths)), 0, -1):
        need = load(lengths[:k], counts[:k], m, fill)
        if need.S <= shape.S and need.P <= shape.P:
            return np.arange(k)
    return np.arange(0)


def selection(
    lengths: Int64[np.ndarray, " k"], counts: Int64[np.ndarray, " k"], m: int, shape: Shape
) -> Int64[np.ndarray, " k"]:
    """Return examples, as indices, that fill m sequences of `shape` well: the longest first, those that fit.

    Each goes into the emptiest sequence or not at all, so that `spread` finds the same places again.
    """
    sizes, heads = lengths.tolist(), counts.tolist()
    full, trained, took = [0] * m, [0] * m, []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        b = full.index(min(full))
        if full[b] + sizes[i] <= shape.S and trained[b] + heads[i] <= shape.P:
            full[b], trained[b] = full[b] + sizes[i], trained[b] + heads[i]
            took.append(i)
    return np.array(sorted(took), dtype=np.int64)


def choose(
    lengths: Mapping[int, Int64[np.ndarray, " k"]],
    counts: Mapping[int, Int64[np.ndarray, " k"]],
    m: int,
    fill: bool,
    shapes: Sequence[Shape],
    apart: bool,
) -> tuple[Shape, dict[int, np.ndarray]]:
    """Return a micro-step's shape and which pending examples (tokens and labels by slot) each slot takes.

    In lockstep that is the first shape that holds them all, or failing that as many leading ones as the
    best shape holds. Out of it (`apart`) slots choose freely within their optimizer batch. The best shape
    is the one whose positions are put to most use. Every slot takes at least one example.
    """
    if not apart:
        needs = [load(n, counts[j], m, fill) for j, n in lengths.items()]
        most = Shape(max(n.S for n in needs), max(n.P for n in needs))
        for shape in shapes:
            if most.S <= shape.S and most.P <= shape.P:
                return shape, {j: np.arange(len(n)) for j, n in lengths.items()}
    best: tuple[float, Shape, dict[int, np.ndarray]] | None = None
    least = max(int(n.min()) for n in lengths.values())
    for shape in shapes:
        if least > shape.S:
            continue
        took = {
            j: selection(n, counts[j], m, shape) if apart else leading(n, counts[j], m, fill, shape)
            for j, n in lengths.items()
        }
        if not all(map(len, took.values())):
            continue
        share = sum(int(n[took[j]].sum()) for j, n in lengths.items()) / (shape.S * m * len(lengths))
        if best is None or share > best[0]:
            best = share, shape, took
    assert best is not None  # the loader refuses data whose longest row does not fit the last shape
    return best[1], best[2]


class Block(NamedTuple):
    """Hold one slot's part of a `Batch`."""

    tokens: Int32[np.ndarray, "m S"]
    positions: Int32[np.ndarray, "m S"]
    rows: Int32[np.ndarray, "m S"]
    trained: Int32[np.ndarray, "m P"]
    targets: Int32[np.ndarray, "m P"]


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


def lay_out(examples: Examples, rows: Int64[np.ndarray, " k"], m: int, fill: bool, shape: Shape) -> Block:
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
