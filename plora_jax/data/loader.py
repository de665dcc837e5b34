"""The pack loader: rectangular micro-batches for J slots, made ahead of the step by a thread."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from plora_jax.data.layout import Block, Cursor, Slot, advance, blank, choose, lay_out, open_batch, pending
from plora_jax.data.shapes import Shape
from plora_jax.errors import UserError
from plora_jax.training.batch import Batch


class Fill(NamedTuple):
    """Count positions handed out: `real` tokens, `padding` beside them, `idle` in slots that do not train."""

    real: int = 0
    padding: int = 0
    idle: int = 0

    @property
    def padded(self) -> float:
        """Give the share of padding among the positions of slots that train."""
        return self.padding / max(1, self.real + self.padding)


START = Cursor()


class _Ahead(NamedTuple):
    """Hold what the thread works on: it advances `cursors` (a list, its own) one micro-step a call."""

    slots: tuple[Slot | None, ...]
    cursors: list[Cursor]


class PackLoader:
    """Iterate over the micro-batches of J slots until every slot is done.

    A micro-step gives every slot its next `group` examples (default m: one a sequence) of its open
    optimizer batch, and ends with that batch (`close`); so `group` must divide every batch size. With
    `fill` examples share sequences: in lockstep (all slots at the same row of the same order) `group` of
    them go into m sequences, out of lockstep as many as fit. Other slots change what a slot gets in two
    ways alone: through the shape, and through whether all are in lockstep.

    `cursors` are those of the batches handed out, not of the ones made ahead: save them, and a loader built
    with them goes on with the same bits. UserError when `group` divides not every batch size, or a row fits
    no shape.
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
        self.cursors = tuple(Cursor(*c) for c in cursors) if cursors else (START,) * len(self.slots)
        self.filled = Fill()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plora-data")
        self._depth = max(1, prefetch)
        self._restart()

    def set_slot(self, j: int, slot: Slot | None, cursor: Cursor = START) -> None:
        """Give slot j another job, or none, from the next micro-step on; batches made ahead are made anew."""
        self._check(slot)
        self.slots = (*self.slots[:j], slot, *self.slots[j + 1 :])
        self.cursors = (*self.cursors[:j], Cursor(*cursor), *self.cursors[j + 1 :])
        self._restart()

    def replaced(self, slots: Sequence[Slot | None], cursors: Sequence[Cursor]) -> "PackLoader":
        """Close this loader and return one like it for other slots, from where `cursors` say they stand."""
        self.close()
        return PackLoader(
            slots,
            self.m,
            self.shapes,
            group=self.group,
            fill=self.fill,
            cursors=cursors,
            prefetch=self._depth,
        )

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
                f"batch size {slot.batch_size} is no multiple of a micro-step's {self.group} examples."
            )
        longest, most = int(slot.examples.lengths.max()), int(slot.examples.counts.max())
        last = self.shapes[-1]
        if longest > last.S or most > last.P:
            raise UserError(
                f"{slot.examples.report.path}: has rows of up to {longest} tokens ({most} trained), "
                f"more than the pack's longest shape of {last.S} ({last.P})."
            )

    def _restart(self) -> None:
        # tasks of an earlier run-ahead still in the thread move their own cursors, which nobody reads
        self._ahead = _Ahead(self.slots, list(self.cursors))
        self._queue: deque[Future] = deque(
            self._thread.submit(self._make, self._ahead) for _ in range(self._depth)
        )

    def _make(self, ahead: _Ahead) -> tuple[Batch, tuple[Cursor, ...]] | None:
        slots, cursors = ahead
        running = {j: s for j, s in enumerate(slots) if s is not None and cursors[j].step < s.steps}
        if not running:
            return None
        places = {(s.examples.digest, s.data_seed, cursors[j].place) for j, s in running.items()}
        apart = self.fill and (len(places) > 1 or cursors[min(running)].place is None)
        batches = {j: open_batch(s, cursors[j]) for j, s in running.items()}
        waiting = {j: pending(s, cursors[j], None if apart else self.group) for j, s in running.items()}
        lengths = {j: s.examples.lengths[batches[j][waiting[j]]] for j, s in running.items()}
        counts = {j: s.examples.counts[batches[j][waiting[j]]] for j, s in running.items()}
        shape, took = choose(lengths, counts, self.m, self.fill, self.shapes, apart)

        blocks = [blank(self.m, shape)] * len(slots)
        made: dict[tuple, Block] = {}  # slots in lockstep share one layout
        closes, active = np.zeros(len(slots), dtype=bool), np.zeros(len(slots), dtype=bool)
        epoch = np.array([c.epoch for c in cursors], dtype=np.int32)
        for j, slot in running.items():
            chosen = waiting[j][took[j]]
            rows = batches[j][chosen]
            key = (id(slot.examples), rows.tobytes())
            if key not in made:
                made[key] = lay_out(slot.examples, rows, self.m, self.fill, shape)
            blocks[j], active[j] = made[key], True
            cursors[j], closes[j] = advance(slot, cursors[j], chosen)
        stacked = [np.stack(parts) for parts in zip(*blocks, strict=True)]
        # numpy here, device arrays once the step takes them
        return Batch(*stacked, epoch, closes, active), tuple(cursors)  # type: ignore[arg-type, call-arg]
