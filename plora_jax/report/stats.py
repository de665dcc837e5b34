"""The statistics of a report: how much of the scores one hyperparameter explains."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

GROUPS = 5  # a knob with more values than this is cut into as many groups of equal count
SHUFFLES = 400


class Group(NamedTuple):
    """Hold the jobs that share a value of a knob, or a range of values: their mean score and their count."""

    label: str
    tick: str  # the value, or the middle one of the range, in few characters
    mean: float
    jobs: int


class Importance(NamedTuple):
    """Say how much of the variance of the scores one knob explains by itself.

    `eta2` is the correlation ratio η² = SS_between / SS_total; `share` is it corrected for bias (Kelley's ε² =
    1 − (1 − η²)(n − 1)/(n − k), cut at 0); `chance` is what ε² stays below in 95 % of shuffles of the scores.
    """

    name: str
    eta2: float
    share: float
    chance: float
    groups: tuple[Group, ...]
    members: np.ndarray  # the group of each job


def importance(name: str, values: Sequence[Any], scores: np.ndarray) -> Importance | None:
    """Measure one knob over jobs with these values and scores; None where it cannot be: one group, or n ≤ groups."""
    members, names = group_values(values)
    n, k = len(scores), len(names)
    total = float(((scores - scores.mean()) ** 2).sum()) if n else 0.0
    if k < 2 or n <= k or total <= 1e-24 * max(1.0, float((scores**2).sum())):
        return None
    counts = np.bincount(members, minlength=k)
    hot = np.zeros((n, k))
    hot[np.arange(n), members] = 1.0
    centred = scores - scores.mean()

    def ratio(rows: np.ndarray) -> np.ndarray:
        between: np.ndarray = ((rows @ hot) ** 2 / counts).sum(-1) / total
        return between

    def corrected(eta2: np.ndarray) -> np.ndarray:
        return np.maximum(1 - (1 - eta2) * (n - 1) / (n - k), 0.0)

    eta2 = ratio(centred[None])
    shuffled = np.random.Generator(np.random.Philox(0)).permuted(np.tile(centred, (SHUFFLES, 1)), axis=1)
    chance = float(np.quantile(corrected(ratio(shuffled)), 0.95))
    means = np.bincount(members, weights=scores, minlength=k) / counts
    groups = tuple(
        Group(*name, mean, count)
        for name, mean, count in zip(names, means.tolist(), counts.tolist(), strict=True)
    )
    return Importance(name, float(eta2[0]), float(corrected(eta2)[0]), chance, groups, members)


def group_values(values: Sequence[Any]) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Return the group of each value and the groups' labels and ticks: values, or ranges of numbers of equal count.

    Numbers of more than GROUPS distinct values are cut at quantiles, equal values together; all else keeps its values.
    """
    texts = [label(value) for value in values]
    numeric = all(
        isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0
        for value in values
    )
    if not numeric or len(set(values)) <= GROUPS:
        order = sorted(set(values)) if numeric else sorted(set(texts))
        keys: Sequence[Any] = values if numeric else texts
        at = {value: i for i, value in enumerate(order)}
        return np.array([at[key] for key in keys], int), [(label(value), label(value)) for value in order]
    numbers = np.array(values, float)
    cuts = np.unique(np.quantile(numbers, np.arange(1, GROUPS) / GROUPS, method="inverted_cdf"))
    members = np.searchsorted(cuts, numbers, side="left")
    used, members = np.unique(members, return_inverse=True)
    names = []
    for g in range(len(used)):
        held = np.sort(numbers[members == g])
        low, high, middle = (_brief(x) for x in (held[0], held[-1], held[len(held) // 2]))
        names.append((low, low) if held[0] == held[-1] else (f"{low}–{high}", f"~{middle}"))
    return members, names


def _brief(value: float) -> str:
    whole = label(value)
    return whole if len(whole) <= 4 else label(float(f"{value:.2g}"))


def label(value: Any) -> str:
    """Write a value of a job's field as a reader would."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        text = f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.6g}"
        return re.sub(r"\.?0*e([+-])0*", lambda m: "e" + m[1].replace("+", ""), text)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "none"
    return str(value) if value != "" else "none"
