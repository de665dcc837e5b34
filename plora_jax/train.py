"""Train one pack: every slot works through its queue of jobs, and a job that ends hands its slot to the next."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from plora_jax.adapters import Adapter, unstack_adapter
from plora_jax.data.examples import Examples
from plora_jax.data.layout import Slot
from plora_jax.data.loader import PackLoader
from plora_jax.data.shapes import Shape
from plora_jax.jobs import Job
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base
from plora_jax.step import (
    Metrics,
    PackSpec,
    empty_pack,
    fresh_slot,
    make_load_slot,
    make_train_step,
    weight_dtype,
)

MAX_SKIPPED = 10  # optimizer steps in a row of non-finite gradients after which a job has failed


@dataclass(frozen=True)
class Trained:
    """Hold what a job leaves behind; `reason` is empty unless it failed."""

    job: Job
    adapter: Adapter
    steps: int
    tokens: int
    reason: str = ""


class Work(NamedTuple):
    """Name a job with its training rows and, where it does not start fresh, its first adapter."""

    job: Job
    examples: Examples
    start: Adapter | None = None


OnStep = Callable[[Job, dict[str, Any]], None]  # one optimizer step's line of metrics
OnMicroStep = Callable[[int], None]  # real tokens of a micro-step that was dispatched


def train_pack(
    base: Base,
    spec: PackSpec,
    queues: Sequence[Sequence[Work]],
    m: int,
    shapes: Sequence[Shape],
    *,
    packing: bool = False,
    runtime: Runtime | None = None,
    on_step: OnStep = lambda job, line: None,
    on_micro_step: OnMicroStep = lambda tokens: None,
) -> Iterator[Trained]:
    """Train `queues[j]` one after another in slot j, and yield each job as it ends.

    A micro-step takes m examples of each slot: one a sequence, or with `packing` end to end in one sequence (`shapes`
    and `runtime.segments` must be made for it). Metrics are read one micro-step late, so that the host never waits
    for the step it has just dispatched. A job fails alone, as soon as MAX_SKIPPED of its gradients in a row are not
    finite, or at its end when none was.
    """
    step = make_train_step(base, spec, runtime)
    load = make_load_slot(spec)
    state = empty_pack(base.config, spec, weight_dtype(base))
    waiting = [list(queue) for queue in queues] + [[] for _ in range(spec.slots - len(queues))]
    running: list[Work | None] = [None] * spec.slots
    tokens = np.zeros(spec.slots, np.int64)
    bad_run = np.zeros(spec.slots, np.int64)
    skipped = np.zeros(spec.slots, np.int64)
    loader = PackLoader([None] * spec.slots, 1 if packing else m, shapes, group=m, fill=packing)

    def fill(j: int) -> None:
        nonlocal state
        running[j] = waiting[j].pop(0) if waiting[j] else None
        work = running[j]
        slot = Slot.of(work.job, work.examples) if work else None
        tokens[j] = bad_run[j] = skipped[j] = 0
        if work and slot:
            state = load(state, j, *fresh_slot(base.config, spec, work.job, slot.steps, work.start))
        loader.set_slot(j, slot)

    def read(metrics: Metrics) -> list[int]:
        """Log the closed batches; return the slots whose job has failed."""
        host: Metrics = jax.device_get(metrics)
        failed = []
        for j in np.flatnonzero(host.closed):
            work = running[j]
            assert work is not None
            tokens[j] += host.tokens[j]
            bad_run[j] = bad_run[j] + 1 if host.skipped[j] > skipped[j] else 0
            skipped[j] = host.skipped[j]
            line = {
                name: getattr(host, name)[j].item() for name in ("step", "loss", "learning_rate", "grad_norm")
            }
            line = {"lr" if k == "learning_rate" else k: v for k, v in line.items()}
            on_step(work.job, {**line, "tokens": int(host.tokens[j]), "skipped": int(host.skipped[j])})
            if bad_run[j] >= MAX_SKIPPED:
                failed.append(int(j))
        return failed

    def take(j: int, reason: str = "") -> Trained:
        work = running[j]
        assert work is not None
        adapter = unstack_adapter(base.config, work.job, state.weights, j)
        steps = loader.cursors[j].step
        return Trained(work.job, jax.device_get(adapter), steps, int(tokens[j]), reason)

    try:
        for j in range(spec.slots):
            fill(j)
        last: Metrics | None = None
        for batch in loader:
            state, metrics = step(state, base.params, batch)
            on_micro_step(int((batch.rows >= 0).sum()))
            failed = read(last) if last is not None else []
            ended = [
                j
                for j, slot in enumerate(loader.slots)
                if slot is not None and batch.active[j] and loader.cursors[j].step >= slot.steps
            ]
            last = metrics
            if failed or ended:
                failed = sorted({*failed, *read(metrics)})
                last = None
                for j in sorted({*failed, *ended}):
                    reason = f"{MAX_SKIPPED} gradients in a row were not finite" if j in failed else ""
                    if not reason and skipped[j] == loader.cursors[j].step:
                        reason = "no gradient was finite"
                    yield take(j, reason)
                    fill(j)
    finally:
        loader.close()
