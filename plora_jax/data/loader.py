"""The pack loader: rectangular micro-batches for J slots, made ahead of the step by a thread."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from plora_jax.batch import Batch
from plora_jax.data.examples import Examples
from plora_jax.data.layout import Block, Cursor, Slot, advance, blank, fitting, lay_out, pending
from plora_jax.data.shapes import Shape
from plora_jax.errors import UserError


class Fill(NamedTuple):
    """Count positions handed out: `real` tokens, `padding` in slots that train, `idle` in slots that do not."""

    real: int = 0
    padding: int = 0
    idle: int = 0

    @property
    def padded(self) -> float:
        """Give the share of padding among the positions of slots that train."""
        return self.padding / max(1, self.real + self.padding)


class _Ahead(NamedTuple):
    """Hold what the thread works on: it advances `cursors` (a list, its own) one micro-step a call."""

    slots: tuple[Slot | None, ...]
    cursors: list[Cursor]


class PackLoader:
    """Iterate over the micro-batches of J slots until every slot is done.

    A micro-step gives every slot that trains its next `group` examples (default m: one a sequence) of its open
    optimizer batch; it ends with that batch (`close`), so `group` must divide every batch size. With `fill` the
    examples share sequences: in lockstep (every slot at the same row of the same order) exactly `group` of them go
    into m sequences, out of lockstep as many as fit. What a slot gets depends on its own cursor and S alone.

    `cursors` are those of the batches handed out, not of the ones made ahead: save them, and a loader built with
    them goes on with the same bits. UserError when `group` does not divide a batch size.
    """

    def __init__(
        self,
        slots: Sequence[Slot | None],
        m: int,
        shapes: Sequence[Shape],
        *,
        group: int | None = None,
        fill: bool = False,
        cursors: Sequence[Cursor] | None = None,
        prefetch: int = 3,
    ):
        self.m, self.shapes, self.group, self.fill = m, sorted(shapes), group or m, fill
        if not fill and self.group != m:
            raise UserError(
                f"{self.group} examples a micro-step need fill: without it {m} sequences hold {m}."
            )
        for slot in slots:
            self._check(slot)
        self.slots = tuple(slots)
        self.cursors = tuple(Cursor(*c) for c in cursors) if cursors else (Cursor(),) * len(self.slots)
        self.filled = Fill()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plora-data")
        self._depth = max(1, prefetch)
        self._restart()

    def set_slot(self, j: int, slot: Slot | None, cursor: Cursor = Cursor()) -> None:
        """Give slot j another job (or none) from the next micro-step on; batches made ahead are made anew."""
        self._check(slot)
        self.slots = (*self.slots[:j], slot, *self.slots[j + 1 :])
        self.cursors = (*self.cursors[:j], Cursor(*cursor), *self.cursors[j + 1 :])
        self._restart()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._queue:
            raise StopIteration
        made = self._queue.popleft().result()
        if made is None:
            self._queue.clear()
            raise StopIteration
        batch, self.cursors = made
        self._queue.append(self._thread.submit(self._make, self._ahead))
        real = int((batch.rows >= 0).sum())
        spaces = self.m * batch.rows.shape[2]
        running = int(batch.active.sum())
        self.filled = Fill(
            self.filled.real + real,
            self.filled.padding + running * spaces - real,
            self.filled.idle + (len(self.slots) - running) * spaces,
        )
        return batch

    def close(self) -> None:
        """Stop the thread; the loader hands out nothing more."""
        self._queue.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, slot: Slot | None) -> None:
        if slot is None:
            return
        if slot.batch_size % self.group:
            raise UserError(
                f"batch size {slot.batch_size} is no multiple of the {self.group} examples a micro-step takes."
            )
        longest, most = int(slot.examples.lengths.max()), int(slot.examples.counts.max())
        last = self.shapes[-1]
        if longest > last.S or most > last.P:
            raise UserError(
                f"{slot.examples.report.path}: its longest row has {longest} tokens ({most} trained at most), more "
                f"than the pack's longest shape of {last.S} ({last.P})."
            )

    def _restart(self) -> None:
        # tasks of an earlier run-ahead still in the thread move their own cursors, which nobody reads any more
        self._ahead = _Ahead(self.slots, list(self.cursors))
        self._queue: deque[Future] = deque(
            self._thread.submit(self._make, self._ahead) for _ in range(self._depth)
        )

    def _make(self, ahead: _Ahead) -> tuple[Batch, tuple[Cursor, ...]] | None:
        slots, cursors = ahead
        running = [j for j, s in enumerate(slots) if s is not None and cursors[j].step < s.steps]
        if not running:
            return None
        heads = {(slots[j].examples.digest, slots[j].data_seed, *cursors[j][:2]) for j in running}  # type: ignore[union-attr]
        apart = self.fill and len(heads) > 1
        rows = {
            j: pending(s, cursors[j], s.batch_size if apart else self.group)
            for j, s in enumerate(slots)
            if s and j in running
        }
        shape, taken = self._choose(slots, rows, apart)

        blocks: list[Block] = [blank(self.m, shape)] * len(slots)
        made: dict[tuple, Block] = {}
        closes = np.zeros(len(slots), dtype=bool)
        epoch = np.array([c.epoch for c in cursors], dtype=np.int32)
        for j in running:
            slot = slots[j]
            assert slot is not None
            key = (id(slot.examples), slot.data_seed, cursors[j].epoch, cursors[j].offset, taken[j])
            if key not in made:
                made[key] = lay_out(slot.examples, rows[j][: taken[j]], self.m, self.fill, shape)
            blocks[j] = made[key]
            cursors[j], closes[j] = advance(slot, cursors[j], taken[j])
        active = np.isin(np.arange(len(slots)), running)
        stacked = [np.stack(parts) for parts in zip(*blocks, strict=True)]
        return Batch(*stacked, epoch=epoch, close=closes, active=active), tuple(cursors)

    def _choose(
        self, slots: Sequence[Slot | None], rows: dict[int, np.ndarray], apart: bool
    ) -> tuple[Shape, dict[int, int]]:
        """Choose the shape with the least padding for each row taken, and how many rows each slot takes of its own.

        Without `fill` (and in lockstep) every slot takes all that is offered at the first shape that holds it.
        """
        best: tuple[float, Shape, dict[int, int]] | None = None
        for shape in self.shapes:
            taken = {j: fitting(slots[j], r, self.m, self.fill, shape) for j, r in rows.items()}  # type: ignore[arg-type]
            if not all(taken.values()):
                continue
            if not apart and all(taken[j] == len(r) for j, r in rows.items()):
                return shape, taken
            real = sum(int(slots[j].examples.lengths[r[: taken[j]]].sum()) for j, r in rows.items())  # type: ignore[union-attr]
            share = real / (shape.S * self.m * len(rows))
            if best is None or share > best[0]:
                best = (share, shape, taken)
        assert best is not None  # _check: every single example fits the last shape
        return best[1], best[2]


def eval_batches(examples: Examples, m: int, shapes: Sequence[Shape]) -> Iterator[Batch]:
    """Yield every example once as batches with J = 1, of like lengths together; `close` marks the last."""
    by_length = np.argsort(examples.lengths, kind="stable")
    groups = [by_length[i : i + m] for i in range(0, len(by_length), m)]
    for i, group in enumerate(groups):
        S, P = int(examples.lengths[group].max()), int(examples.counts[group].max())
        shape = next((s for s in sorted(shapes) if s.S >= S and s.P >= P), None)
        if shape is None:
            raise UserError(
                f"{examples.report.path}: a row of {S} tokens ({P} trained) is longer than every shape."
            )
        block = lay_out(examples, group, m, False, shape)
        ends = np.array([i + 1 == len(groups)])
        yield Batch(
            *(part[None] for part in block), epoch=np.zeros(1, np.int32), close=ends, active=np.ones(1, bool)
        )
