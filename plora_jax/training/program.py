"""The program of a pack: what one compiled step can hold, and which jobs can take a slot of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from planner.signature import Signature, fits
from plora_jax.config.sweep import Sweep
from plora_jax.data.examples import Examples
from plora_jax.data.shapes import MAX_SHAPES, Shape, choose_shapes
from plora_jax.evaluation.scorer import runtime_for
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base
from plora_jax.planning import examples_size, job_spec, trained_rows
from plora_jax.training.kept import KeptStep
from plora_jax.training.recompute import with_policy
from plora_jax.training.step import PackSpec, pack_spec
from plora_jax.training.trainer import Work

# micro-steps, for each layer that is written out, in which one more compiled length is worth its compilation
STEPS_PER_SHAPE = 64


@dataclass(frozen=True)
class Program:
    """Hold what a pack's step is compiled for; made of the pack's planned jobs, so that a resumed pack has the same."""

    base: Base
    spec: PackSpec
    m: int
    shapes: Sequence[Shape]
    runtime: Runtime
    packing: bool

    @staticmethod
    def of(sweep: Sweep, base: Base, pack: dict[str, Any], work: Sequence[Work]) -> "Program":
        """Make the program of a pack (as plan.json has it) for its planned jobs."""
        m, packing = pack["m"], sweep.data.packing and pack["m"] > 1
        runtime = with_policy(runtime_for(base), pack["policy"], base.config.n_layers)
        return Program(
            base,
            pack_spec(
                base.config,
                [item.job for item in work],
                slots=len(pack["slots"]),
                m=None if packing else m,  # examples that share rows may end a batch later
            ),
            m,
            _shapes(sweep, work, m, packing, runtime),
            replace(runtime, segments=packing),
            packing,
        )

    @property
    def tokens(self) -> int:
        """Count the tokens of the largest micro-step, padding included."""
        return self.spec.slots * (1 if self.packing else self.m) * max(shape.S for shape in self.shapes)

    @property
    def scored_at_once(self) -> int:
        """Count the tokens that may be scored at once, in no more memory than the step has just let go of.

        A forward pass holds one layer's values, the step those that its policy keeps of every layer, and gradients.
        """
        if jax.default_backend() == "cpu":  # where more at once is no faster
            return self.tokens
        layers = self.base.config.n_layers
        return self.tokens * {"layer": 2, "offload": 1}.get(self.runtime.recompute, max(1, layers // 4))

    def seek(self) -> None:
        """Begin to read the pack's compiled steps, where they are kept; the base may be abstract."""
        KeptStep(self.base, self.spec, self.runtime).seek(1 if self.packing else self.m, self.shapes)

    @cached_property
    def signature(self) -> Signature:
        """Say in the planner's words which jobs fit."""
        return Signature(
            J=self.spec.slots,
            m=self.m,
            buckets=tuple(shape.S for shape in self.shapes),
            rank_bucket=self.spec.rank,
            targets=frozenset(self.spec.sites),
            has_dropout=self.spec.has_dropout,
            optimizers=self.spec.optimizers,
            dtype=str(self.runtime.dtype),
            policy=self.runtime.recompute,
            accumulate=self.spec.accumulate,
        )

    def fits(self, item: Work) -> bool:
        """Tell whether a job can take a slot without a recompile."""
        sites = frozenset(pack_spec(self.base.config, [item.job]).sites)
        job = replace(job_spec(item.job, examples_size(item.examples), ""), targets=sites)
        short = int(item.examples.counts.max()) <= self.shapes[-1].P
        return fits(self.signature, job) and short


def _shapes(sweep: Sweep, work: Sequence[Work], m: int, packing: bool, runtime: Runtime) -> Sequence[Shape]:
    pairs = [(item.examples, item.job.data_seed) for item in work]
    if sweep.data.buckets:
        return [fitting_shape(length, [e for e, _ in pairs]) for length in sweep.data.buckets]
    micro_steps = max(trained_rows(item.job, len(item.examples)) // m for item in work)
    limit = min(MAX_SHAPES, 1 + micro_steps // (STEPS_PER_SHAPE * runtime.unroll))
    return choose_shapes(pairs, 1 if packing else m, group=m, fill=packing, limit=limit)


def fitting_shape(length: int, data: Sequence[Examples]) -> Shape:
    """Return the shape of `length` positions that holds the labels of every row that short."""
    most = max(
        (int(examples.counts[examples.lengths <= length].max(initial=1)) for examples in data), default=1
    )
    return Shape(length, min(length, most))
