"""Fit the memory and the time model to measured points, and judge both on points that were held out.

Memory points come from `compiled.memory_analysis()` of the real step on a GPU: {"model": {…ModelShape…},
"precision", "attention", "fused" (multiprocessors for the fused kernel; 0 if absent), "degree", "J", "m", "S",
"rank_bucket", "policy", "optimizer", "accumulate" (true if absent), "bytes"}. Time points from profiles of one
model, degree, policy and precision: {"J", "m", "S", "rank_bucket", "seconds"}.
"""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.devices import DeviceSpec
from planner.errors import PlanError
from planner.memory import MemoryModel, StepShape, head_is_done, memory_terms, step_memory
from planner.specs import ModelShape
from planner.time import StepCost

WORKING = (
    1.6  # a layer's working memory has so many times the logits' factor: tells which is larger before the fit
)
FACTORS = tuple(f.name for f in fields(MemoryModel) if f.name not in ("fixed_bytes", "margin", "source"))


class MemoryPoint(NamedTuple):
    """Hold one compiled step and the bytes it needs on a device."""

    shape: ModelShape
    step: StepShape
    precision: str
    device: DeviceSpec
    bytes: float


class TimePoint(NamedTuple):
    """Hold one measured micro-step."""

    J: int
    m: int
    S: float
    rank_bucket: int
    seconds: float


class Fit(NamedTuple):
    """Hold how good a fit is on held-out points: mean and worst absolute error, worst under-prediction, as
    shares.
    """

    mean: float
    worst: float
    under: float
    points: int


def read_memory_points(path: str | Path) -> list[MemoryPoint]:
    """Read memory points from a JSON list.

    Raises:
        PlanError: the file is no such list, or a point lacks a field.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))
        return [
            MemoryPoint(
                ModelShape(**{**row["model"], "sites": tuple(tuple(site) for site in row["model"]["sites"])}),
                StepShape(
                    row["degree"],
                    row["J"],
                    row["m"],
                    row["S"],
                    row["rank_bucket"],
                    row["policy"],
                    frozenset({row["optimizer"]}),
                    accumulate=row.get("accumulate", True),
                ),
                row["precision"],
                DeviceSpec("GPU", 0, attention=row["attention"], fused=row.get("fused", 0)),
                float(row["bytes"]),
            )
            for row in rows
        ]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanError(f"memory points {path}: {type(error).__name__}: {error}") from None


def fit_memory(points: Sequence[MemoryPoint], held_out: Sequence[MemoryPoint]) -> tuple[MemoryModel, Fit]:
    """Fit the factors of the memory terms by non-negative least squares on relative errors; judge on
    `held_out`.

    Factors without a point to tell them keep 1. The margin becomes the largest under-prediction on any point,
    so that no point is predicted too small.

    Raises:
        PlanError: fewer points than factors they tell.
    """
    from scipy.optimize import nnls

    rows = [memory_terms(p.shape, p.step, p.precision, p.device) for p in points]
    for row, p in zip(rows, points, strict=True):
        if head_is_done(p.step.policy, p.device):
            row["logits" if WORKING * row["working"] > row["logits"] else "working"] = 0.0
    told = [name for name in FACTORS if any(row.get(name) for row in rows)]
    if len(points) < len(told) + 1:
        raise PlanError(f"{len(points)} memory points cannot tell {len(told) + 1} factors; measure more")
    A = np.array([[row.get(name, 0.0) for name in told] + [2.0**20] for row in rows])
    target = np.array([p.bytes for p in points])
    # a weak pull to the analytic factors keeps terms that always come together from taking each other's place
    pull = 0.02 * np.eye(len(told), len(told) + 1)
    solution, _ = nnls(
        np.vstack([A / target[:, None], pull]),
        np.concatenate([np.ones(len(points)), 0.02 * np.ones(len(told))]),
    )
    factors = dict(zip(told, map(float, solution), strict=False))
    model = replace(
        MemoryModel(),
        **factors,
        fixed_bytes=float(solution[-1]) * 2**20,
        margin=0.0,
        source=f"{len(points)} points",
    )
    errors = [_memory_error(model, p) for p in (*points, *held_out)]
    margin = max(0.0, *(1 / (1 + e) - 1 for e in errors))
    judged = judge([_memory_error(model, p) for p in held_out])
    return replace(model, margin=margin), judged


def _memory_error(model: MemoryModel, p: MemoryPoint) -> float:
    return step_memory(p.shape, p.step, p.precision, p.device, model) / p.bytes - 1


def judge(errors: Sequence[float]) -> Fit:
    """Sum up relative errors (prediction / truth − 1)."""
    e = np.array(errors) if len(errors) else np.zeros(1)
    return Fit(float(np.abs(e).mean()), float(np.abs(e).max()), float(max(0.0, -e.min())), len(errors))


def fit_time(points: Sequence[TimePoint], held_out: Sequence[TimePoint] = ()) -> tuple[StepCost, Fit]:
    """Fit T = t0 + c·J·m·S + J·(a0 + a1·m·S)·rank bucket by non-negative least squares on relative errors.

    Raises:
        PlanError: fewer than four points.
    """
    from scipy.optimize import nnls

    if len(points) < 4:
        raise PlanError(f"{len(points)} time points; at least four are needed")
    rows = [(1.0, p.J * p.m * p.S, p.J * p.rank_bucket, p.J * p.m * p.S * p.rank_bucket) for p in points]
    seconds = np.array([p.seconds for p in points])
    A = np.array(rows) / seconds[:, None]
    scale = np.maximum(A.max(axis=0), 1e-30)
    solution, _ = nnls(A / scale, np.ones(len(points)))
    cost = StepCost(*(float(v) for v in solution / scale))
    return cost, judge([cost.seconds(p.J, p.m, p.S, p.rank_bucket) / p.seconds - 1 for p in held_out])
