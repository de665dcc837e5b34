"""What a plan is made from: the model's shape and the jobs. Plain numbers: no JAX, no weights."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from planner.errors import PlanError

RANK_BUCKETS = (8, 16, 32, 64, 128, 256)
PRECISION_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.03, "fp8": 1.03, "nf4": 0.56}  # with their scales
MOMENT_BYTES = {"adamw": 8, "adamw_bf16": 4, "sgd": 4}  # an optimizer keeps for each adapter parameter


def rank_bucket(rank: int) -> int:
    """Round a rank up to the stack it is stored in; past the last bucket, to a multiple of it."""
    for bucket in RANK_BUCKETS:
        if rank <= bucket:
            return bucket
    return -(-rank // RANK_BUCKETS[-1]) * RANK_BUCKETS[-1]


@dataclass(frozen=True)
class ModelShape:
    """Describe a decoder by its sizes; `sites` are the Linears that may carry an adapter: (name, d_in,
    d_out).

    `norms` of a layer are over D; `qk_norm`: queries and keys are normalised; `flash`: cuDNN's attention can serve
    the model.
    """

    name: str
    n_layers: int
    d_model: int
    d_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    n_params: int
    sites: tuple[tuple[str, int, int], ...]
    norms: int = 2
    qk_norm: bool = False
    flash: bool = True

    def __post_init__(self) -> None:
        sizes = (self.n_layers, self.d_model, self.d_ff, self.n_heads, self.n_kv_heads, self.head_dim)
        if min(*sizes, self.vocab_size, self.n_params) < 1:
            raise PlanError(f"model {self.name}: every size must be at least 1, got {self}")

    @cached_property
    def embedding_params(self) -> int:
        """Count the token embedding and, where it is not tied, the head."""
        return self.vocab_size * self.d_model * (1 if self.tied else 2)

    @cached_property
    def linear_params(self) -> int:
        """Count the layers' parameters: what every token multiplies with, and what precision quantises."""
        return max(self.n_params - self.embedding_params, 1)

    def adapter_params(self, rank: int, targets: frozenset[str] | None = None) -> int:
        """Count one adapter's parameters at a rank: L · Σ_sites r (d_in + d_out)."""
        return self.n_layers * rank * sum(i + o for n, i, o in self.sites if targets is None or n in targets)


def decoder_shape(
    name: str, n_layers: int, d_model: int, d_ff: int, n_heads: int, n_kv_heads: int, head_dim: int,
    vocab_size: int, *, tied: bool = False,
) -> ModelShape:  # fmt: skip
    """Make the shape of a Llama-like decoder (seven projections, gated MLP) from its sizes."""
    q, kv = n_heads * head_dim, n_kv_heads * head_dim
    sites = (
        ("q_proj", d_model, q), ("k_proj", d_model, kv), ("v_proj", d_model, kv), ("o_proj", q, d_model),
        ("gate_proj", d_model, d_ff), ("up_proj", d_model, d_ff), ("down_proj", d_ff, d_model),
    )  # fmt: skip
    layers = n_layers * (sum(i * o for _, i, o in sites) + 2 * d_model)
    n_params = layers + vocab_size * d_model * (1 if tied else 2) + d_model
    return ModelShape(
        name, n_layers, d_model, d_ff, n_heads, n_kv_heads, head_dim, vocab_size, tied, n_params, sites
    )


@dataclass(frozen=True)
class JobSpec:
    """Describe one job as the planner sees it.

    `rows` counts training examples × epochs (or steps × batch size); `row_tokens` is the mean number of real
    tokens of a row and sets the time; `max_row_tokens` is the longest length bucket and sets the memory;
    `data` names data set and order: jobs with equal `data` see equal lengths and waste nothing in one pack;
    `eval_tokens` are those of all its evaluations; `accumulate` says that gradients are summed over micro-steps
    even where one holds a whole batch; `state_bytes` are read before or written after it, where it goes on from
    or to another pack.
    """

    job_id: str
    rank: int
    batch_size: int
    rows: int
    row_tokens: float
    max_row_tokens: int
    data: str = ""
    targets: frozenset[str] | None = None
    has_dropout: bool = False
    optimizer: str = "adamw"
    eval_tokens: int = 0
    accumulate: bool = False
    state_bytes: int = 0

    def __post_init__(self) -> None:
        checks = {
            "rank": (self.rank, 1, 4096), "batch_size": (self.batch_size, 1, 65_536),
            "rows": (self.rows, 1, 10**12), "row_tokens": (self.row_tokens, 1, 2**24),
            "max_row_tokens": (self.max_row_tokens, 1, 2**24), "eval_tokens": (self.eval_tokens, 0, 10**15),
            "state_bytes": (self.state_bytes, 0, 10**15),
        }  # fmt: skip
        for name, (value, low, high) in checks.items():
            if not (math.isfinite(value) and low <= value <= high):
                raise PlanError(f"job {self.job_id}: {name} is {value}; allowed is {low} to {high}")
        if self.row_tokens > self.max_row_tokens:
            raise PlanError(
                f"job {self.job_id}: row_tokens (a mean, {self.row_tokens}) exceeds "
                f"max_row_tokens {self.max_row_tokens}"
            )
        if self.optimizer not in MOMENT_BYTES:
            raise PlanError(
                f"job {self.job_id}: optimizer {self.optimizer!r}; allowed is {sorted(MOMENT_BYTES)}"
            )

    @property
    def bucket(self) -> int:
        """Return the rank bucket the job's adapter is stored in."""
        return rank_bucket(self.rank)

    def sums(self, m: int) -> bool:
        """Say whether gradients are summed over micro-steps of m rows, in a buffer of their own."""
        return self.accumulate or self.batch_size != m

    def micro_steps(self, m: int) -> int:
        """Count the micro-steps the job holds a slot of m rows."""
        return -(-self.rows // m)

    def shape_key(self) -> tuple:
        """Return what planning depends on: jobs with equal keys are interchangeable."""
        targets = None if self.targets is None else tuple(sorted(self.targets))
        return (
            self.data, self.row_tokens, self.max_row_tokens, self.bucket, self.batch_size, self.rows,
            targets, self.has_dropout, self.optimizer, self.eval_tokens, self.accumulate, self.state_bytes,
        )  # fmt: skip


def check_jobs(jobs: list[JobSpec], shape: ModelShape) -> tuple[list[JobSpec], list[str]]:
    """Return the jobs to plan, exact duplicates merged, with a note for each merge.

    Raises:
        PlanError: no jobs; one id for two different jobs; a target that the model does not have.
    """
    if not jobs:
        raise PlanError("no jobs to plan: the sweep is empty; give at least one configuration")
    kept: dict[str, JobSpec] = {}
    notes = []
    names = {name for name, _, _ in shape.sites}
    for job in jobs:
        if job.job_id in kept and kept[job.job_id] != job:
            raise PlanError(f"two different jobs are both called {job.job_id}; job ids must differ")
        if job.job_id in kept:
            notes.append(f"job {job.job_id} was given more than once and is planned once")
            continue
        if job.targets is not None and not job.targets:
            raise PlanError(f"job {job.job_id}: targets is empty; {shape.name} offers {sorted(names)}")
        if unknown := (job.targets or frozenset()) - names:
            raise PlanError(
                f"job {job.job_id}: targets {sorted(unknown)} are not in {shape.name}; "
                f"allowed is {sorted(names)}"
            )
        kept[job.job_id] = job if job.targets != names else replace(job, targets=None)
    return list(kept.values()), notes
