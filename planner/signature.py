"""The signature of a pack: what its step is compiled for, and the one rule for which jobs it can take."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.specs import JobSpec

POLICIES = (
    "none",
    "dots",
    "layer",
)  # what the backward pass keeps: everything, matrix products, layer inputs
LAST_RESORT = "offload"  # as layer, but inputs wait in the host's memory: where nothing else holds some job
LENGTH_STEP = 8  # lengths are padded to a multiple of this


@dataclass(frozen=True)
class Signature:
    """Name a compiled step: J slots, m rows a slot, length buckets, rank bucket and the union of its jobs'
    needs.

    `targets` is None when every site of the model carries an adapter. Learning rate, schedule, betas, decay,
    clipping, dropout rate and scale are traced and so are not part of it.
    """

    J: int
    m: int
    buckets: tuple[int, ...]
    rank_bucket: int
    targets: frozenset[str] | None
    has_dropout: bool
    optimizers: frozenset[str]
    dtype: str
    policy: str
    accumulate: bool = (
        True  # gradients are summed over micro-steps; else each must end the batch of every job
    )


def length_bucket(max_row_tokens: int) -> int:
    """Round the longest row up to the padded length it is laid out in."""
    return -(-max_row_tokens // LENGTH_STEP) * LENGTH_STEP


def fits(signature: Signature, job: JobSpec) -> bool:
    """Say whether a job can take a slot of this step without a recompile; the planner and slot refill both
    ask.
    """
    inside = signature.targets is None or (job.targets is not None and job.targets <= signature.targets)
    return (
        inside
        and job.rank <= signature.rank_bucket
        and job.batch_size % signature.m == 0
        and job.max_row_tokens <= max(signature.buckets)
        and (signature.has_dropout or not job.has_dropout)
        and job.optimizer in signature.optimizers
        and (signature.accumulate or not job.sums(signature.m))
    )


def batch_divisor(jobs: Iterable[JobSpec]) -> int:
    """Return the greatest m that divides every batch size."""
    return math.gcd(*(job.batch_size for job in jobs))


def divisors(n: int) -> list[int]:
    """Return the divisors of n, greatest first."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)}, reverse=True)


def union_targets(jobs: Iterable[JobSpec]) -> frozenset[str] | None:
    """Return the sites that any of the jobs adapts; None means all of the model's."""
    out: frozenset[str] = frozenset()
    for job in jobs:
        if job.targets is None:
            return None
        out |= job.targets
    return out


def signature_of(jobs: Iterable[JobSpec], J: int, m: int, policy: str, dtype: str) -> Signature:
    """Make the smallest signature that fits all the jobs."""
    jobs = list(jobs)
    return Signature(
        J=J,
        m=m,
        buckets=tuple(sorted({length_bucket(job.max_row_tokens) for job in jobs})),
        rank_bucket=max(job.bucket for job in jobs),
        targets=union_targets(jobs),
        has_dropout=any(job.has_dropout for job in jobs),
        optimizers=frozenset(job.optimizer for job in jobs),
        dtype=dtype,
        policy=policy,
        accumulate=any(job.sums(m) for job in jobs),
    )
