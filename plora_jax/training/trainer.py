"""Train one pack: every slot works on a job of its own, and takes the next when that one has ended."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plora_jax.adapters import Adapter, Factors, pad_adapter, ranks, unstack_adapter
from plora_jax.data.examples import Examples
from plora_jax.data.layout import Cursor, Slot
from plora_jax.data.loader import PackLoader
from plora_jax.data.shapes import Shape
from plora_jax.jobs import Job
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base
from plora_jax.training.kept import KeptStep
from plora_jax.training.optim import init_optimizer
from plora_jax.training.step import (
    Metrics,
    PackSpec,
    Progress,
    empty_pack,
    fresh_slot,
    job_axes,
    make_load_slot,
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


class Waiting(NamedTuple):
    """Hold a job between two packs: its adapter and moments at its true rank, and a JSON-able description.

    It is whole between two optimizer batches alone, when no gradient is summed. Nothing in it depends on the pack.
    """

    arrays: dict[str, Any]
    meta: dict[str, Any]


@dataclass
class Running:
    """Count what a slot's job has done, as far as its metrics have been read."""

    job: Job
    steps: int  # of its whole training
    tokens: int = 0
    bad_run: int = 0  # optimizer steps in a row that changed nothing
    skipped: int = 0
    logged: int = 0  # lines of metrics
    loss: float = float("nan")  # of the last optimizer batch
    reason: str = ""  # why it has failed


OnStep = Callable[[Job, dict[str, Any]], None]  # one optimizer step's line of metrics
OnMicroStep = Callable[[int], None]  # real tokens of a micro-step that was dispatched


class Trainer:
    """Hold a pack in training: the state on the device, and what the host knows of each slot.

    A micro-step takes m examples of each slot: one a sequence, or with `packing` end to end in one sequence (`shapes`
    and `runtime.segments` must be made for it). Metrics are read one micro-step late, so that the host never waits
    for the step it has just dispatched; `sync` reads the last. What happens depends on the micro-step's number alone,
    never on when the host looks.
    """

    def __init__(
        self,
        base: Base,
        spec: PackSpec,
        m: int,
        shapes: Sequence[Shape],
        *,
        packing: bool = False,
        runtime: Runtime | None = None,
        on_step: OnStep = lambda job, line: None,
    ) -> None:
        self.base, self.on_step, self._runtime = base, on_step, runtime
        self.running: list[Running | None] = [None] * spec.slots
        self.micro_step = 0
        self._last: Metrics | None = None
        self._shape: Shape | None = None  # of the last micro-step
        self._loader = PackLoader([None] * spec.slots, 1 if packing else m, shapes, group=m, fill=packing)
        self._use(spec)
        self.state = empty_pack(base.config, spec, weight_dtype(base))

    def _use(self, spec: PackSpec) -> None:
        self.spec = spec
        self._step = KeptStep(self.base, spec, self._runtime)
        self._load = make_load_slot(spec)

    def put(self, j: int, work: Work | None, waited: Waiting | None = None) -> None:
        """Start a job in slot j, go on with one that has waited, or leave the slot empty.

        Raises:
          UserError: m does not divide the job's batch size, or its rows are longer than the pack's shapes.
        """
        slot = Slot.of(work.job, work.examples) if work else None
        cursor = Cursor(*waited.meta["cursor"]) if waited else Cursor()
        self._loader.set_slot(j, slot, cursor)
        self.running[j] = Running(work.job, slot.steps) if work and slot else None
        if work and slot:
            start, progress = work.start, None
            if waited:
                running = Running(**waited.meta["running"] | {"job": work.job})
                self.running[j], start = running, waited.arrays["weights"]
                progress = Progress(
                    {work.job.optimizer: _each_adapter(self._pad, waited.arrays["optimizer"])},
                    cursor.step,
                    running.skipped,
                )
            fresh = fresh_slot(self.base.config, self.spec, work.job, slot.steps, start)
            self.state = self._load(self.state, j, *fresh, progress)

    def pause(self, j: int) -> Waiting:
        """Return all that `put` needs to go on with slot j's job elsewhere; it must have just closed a batch."""
        run, cursor = self.running[j], self._loader.cursors[j]
        assert run and not cursor.taken and self._last is None
        held = jax.device_get(_slot((self.state.weights, self.state.optimizer[run.job.optimizer]), j))
        weights, moments = _each_adapter(
            partial(unstack_adapter, self.base.config, run.job, slot=0), held, lambda count: count[0]
        )
        meta = {"cursor": list(cursor), "running": asdict(run) | {"job": run.job.job_id}}
        return Waiting({"weights": weights, "optimizer": moments}, meta)

    def _pad(self, adapter: Adapter) -> Adapter:
        return pad_adapter(self.base.config, adapter, self.spec.rank, self.spec.sites)

    @property
    def slots(self) -> list[int]:
        """List the slots that hold a job."""
        return [j for j, held in enumerate(self.running) if held]

    def step_of(self, j: int) -> int:
        """Return how many optimizer batches slot j's job has closed."""
        return self._loader.cursors[j].step

    def advance(self) -> int:
        """Dispatch one micro-step, read the metrics of the one before, and return the real tokens in it."""
        batch = next(self._loader)
        self.state, metrics = self._step(self.state, self.base.params, batch)
        self.micro_step += 1
        self._shape = Shape(batch.tokens.shape[-1], batch.trained.shape[-1])
        last, self._last = self._last, metrics
        self._read(last)
        return int((batch.rows >= 0).sum())

    @property
    def unread(self) -> Shape | None:
        """Return the shape of the micro-step whose metrics are not read yet, None when all are."""
        return None if self._last is None else self._shape

    def sync(self) -> None:
        """Read the metrics of the last micro-step, which waits for it."""
        last, self._last = self._last, None
        self._read(last)

    def over(self) -> list[int]:
        """List the slots whose job has made its last step or has failed; once there is one, all metrics are read.

        A job fails alone, as soon as MAX_SKIPPED of its gradients in a row are not finite, or at its end when none was.
        """

        def found() -> list[int]:
            held = [(j, run) for j, run in enumerate(self.running) if run]
            return [j for j, run in held if run.reason or self.step_of(j) >= run.steps]

        if not found():
            return []
        self.sync()
        for j in found():
            run = self.running[j]
            assert run
            if not run.reason and run.skipped == self.step_of(j):
                run.reason = "no gradient was finite"
        return found()

    def take(self, j: int) -> Trained:
        """Return what slot j's job has come to."""
        run = self.running[j]
        assert run
        adapter = unstack_adapter(self.base.config, run.job, jax.device_get(_slot(self.state.weights, j)), 0)
        return Trained(run.job, adapter, self.step_of(j), run.tokens, run.reason)

    def shrink(self, keep: Sequence[int], slots: int) -> None:
        """Go on with fewer slots, by a smaller step: slot keep[i] becomes slot i, and those beyond are empty."""
        self.sync()
        places = np.array(
            [*keep, *[keep[0]] * (slots - len(keep))]
        )  # an empty slot holds what no batch will touch
        axes = job_axes(self.spec)

        def pick(axis: int, stacked: Any) -> Any:
            return jax.tree.map(lambda leaf: jnp.take(leaf, places, axis), stacked)

        self.state = jax.tree.map(pick, axes, self.state)
        self._use(replace(self.spec, slots=slots))
        self.running = [self.running[j] for j in keep] + [None] * (slots - len(keep))
        empty = slots - len(keep)
        loader = self._loader
        held = [*(loader.slots[j] for j in keep), *[None] * empty]
        self._loader = loader.replaced(held, [*(loader.cursors[j] for j in keep), *[Cursor()] * empty])

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all that `restore` needs: arrays (of the device), and a JSON-able description."""
        held = [asdict(run) | {"job": run.job.job_id} if run else None for run in self.running]
        meta = {
            "micro_step": self.micro_step,
            "slots": held,
            "cursors": [list(c) for c in self._loader.cursors],
        }
        unread = self._last is not None
        last = self._last if self._last is not None else self._no_metrics(self.spec.slots)
        return {"state": self.state, "last": last}, meta | {"unread": unread}

    def like(self, slots: int) -> dict[str, Any]:
        """Return the shapes of the arrays of a snapshot that was taken with so many slots."""
        spec = replace(self.spec, slots=slots)
        shapes = partial(empty_pack, self.base.config, spec, weight_dtype(self.base))
        return {"state": jax.eval_shape(shapes), "last": jax.eval_shape(partial(self._no_metrics, slots))}

    def restore(self, arrays: dict[str, Any], meta: dict[str, Any], work: Mapping[str, Work]) -> None:
        """Go back to a snapshot; `work` holds its jobs by job_id."""
        items = [work[held["job"]] if held else None for held in meta["slots"]]
        self._use(replace(self.spec, slots=len(items)))
        slots = [Slot.of(item.job, item.examples) if item else None for item in items]
        self._loader = self._loader.replaced(slots, [Cursor(*cursor) for cursor in meta["cursors"]])
        self.running = [
            Running(**held | {"job": item.job}) if item else None
            for held, item in zip(meta["slots"], items, strict=True)
        ]
        self.micro_step = meta["micro_step"]
        self.state = jax.tree.map(jnp.asarray, arrays["state"])
        self._last = arrays["last"] if meta["unread"] else None

    def close(self) -> None:
        """Stop making batches."""
        self._loader.close()

    def _no_metrics(self, slots: int) -> Metrics:
        real, whole = jnp.zeros(slots, weight_dtype(self.base)), jnp.zeros(slots, jnp.int32)
        return Metrics(jnp.zeros(slots, bool), whole, real, whole, real, real, whole)

    def _read(self, metrics: Metrics | None) -> None:
        if metrics is None:
            return
        host: Metrics = jax.device_get(metrics)
        for j in np.flatnonzero(host.closed):
            run = self.running[j]
            assert run
            names = {"step": "step", "loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm"}
            line = {name: getattr(host, source)[j].item() for name, source in names.items()}
            run.tokens += int(host.tokens[j])
            run.bad_run = run.bad_run + 1 if host.skipped[j] > run.skipped else 0
            run.skipped, run.loss, run.logged = int(host.skipped[j]), line["loss"], run.logged + 1
            if run.bad_run >= MAX_SKIPPED:
                run.reason = f"{MAX_SKIPPED} gradients in a row were not finite"
            self.on_step(run.job, {**line, "tokens": int(host.tokens[j]), "skipped": run.skipped})


@jax.jit
def _slot(stacks: Any, j: int) -> Any:
    """Cut out one slot, whichever it is, by one compiled program; the job axis of counts is the first."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, j, 1, axis=min(1, leaf.ndim - 1)), stacks
    )


def _each_adapter(
    change: Callable[[Any], Adapter], state: Any, other: Callable[[Any], Any] = lambda count: count
) -> Any:
    """Change what has the form of an adapter (in weights and optimizer state alike), and what else there is."""
    return jax.tree.map(
        lambda one: change(one) if isinstance(one, dict) else other(one),
        state,
        is_leaf=lambda one: isinstance(one, dict),
    )


def waiting_like(base: Base, job: Job) -> dict[str, Any]:
    """Return arrays of the shapes and types of a job that waits, to read them into."""
    config, dtype = base.config, weight_dtype(base)
    sites = {site.name: site for site in config.sites}

    def fresh() -> dict[str, Any]:
        weights = {
            name: Factors(
                jnp.zeros((config.n_layers, int(rank.max()), sites[name].d_in), dtype),
                jnp.zeros((config.n_layers, sites[name].d_out, int(rank.max())), dtype),
            )
            for name, rank in ranks(config, job).items()
        }
        kind = job.optimizer
        return {"weights": weights, "optimizer": init_optimizer(weights, frozenset({kind}))[kind]}

    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), jax.eval_shape(fresh))


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
    """Train `queues[j]` one after another in slot j, and yield each job as it ends; arguments are Trainer's."""
    trainer = Trainer(base, spec, m, shapes, packing=packing, runtime=runtime, on_step=on_step)
    waiting = [list(queue) for queue in queues] + [[] for _ in range(spec.slots - len(queues))]
    try:
        for j, queue in enumerate(waiting):
            trainer.put(j, queue.pop(0) if queue else None)
        while trainer.slots:
            on_micro_step(trainer.advance())
            for j in trainer.over():
                yield trainer.take(j)
                trainer.put(j, waiting[j].pop(0) if waiting[j] else None)
    finally:
        trainer.close()
