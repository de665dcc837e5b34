"""Axes of a chart: from values to positions in a drawing, with round ticks and short numbers."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from plora_jax.report.stats import label


class Tick(NamedTuple):
    """Hold a tick's position in the drawing and its text."""

    at: float
    text: str


class Scale(NamedTuple):
    """Map [low, high] onto [start, end] of the drawing, by logarithms where `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value, to a tenth of a unit."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, count: int = 5) -> list[Tick]:
        """Return about `count` ticks at round values."""
        values = _log_values(self.low, self.high) if self.log else _values(self.low, self.high, count)
        return [Tick(self(value), short(value)) for value in values]


def make_scale(
    values: Sequence[float], start: float, end: float, *, log: bool = False, pad: float = 0.04
) -> Scale:
    """Return a scale that holds the values with a margin of `pad` on both sides (a linear one from 0 keeps 0)."""
    low, high = (min(values), max(values)) if len(values) else (0.0, 1.0)
    if low == high:
        low, high = (
            (low / 1.5, high * 1.5)
            if log
            else (low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5))
        )
    elif log:
        factor = (high / low) ** pad
        low, high = low / factor, high * factor
    else:
        margin = (high - low) * pad
        low, high = (0.0 if low == 0.0 else low - margin), high + margin
    return Scale(low, high, start, end, log)


def _values(low: float, high: float, count: int) -> list[float]:
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_values(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = max(last - first, 1)
    steps = (1, 2, 5) if decades <= 3 else (1,)
    stride = max(decades // 5, 1)
    values = [step * 10.0**power for power in range(first, last + 1, stride) for step in steps]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def short(value: float) -> str:
    """Write a number in few characters: 1.2M, 45k, 0.25, 3e-4."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit and abs(value) < 1e15:
            return f"{value / limit:.3g}{unit}"
    return label(float(f"{value:.4g}"))


def span(seconds: float) -> str:
    """Write a time on an axis or in a sentence: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    seconds = round(seconds)
    if seconds < 120:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def time_ticks(scale: Scale, count: int = 8) -> list[Tick]:
    """Return ticks of a scale in seconds, at steps that a clock has."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
    step = next(
        (s for s in steps if (scale.high - scale.low) / s <= count),
        86_400 * math.ceil((scale.high - scale.low) / 86_400 / count),
    )
    return [Tick(scale(at), span(at)) for at in range(0, math.floor(scale.high) + 1, step) if at >= scale.low]


def apart(positions: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Return the positions moved as little as needed to be `least` apart within [low, high], order kept."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    out = [float(p) for p in positions]
    for before, after in pairwise(order):
        out[after] = max(out[after], out[before] + least)
    if order and out[order[-1]] > high:
        out[order[-1]] = high
        for after, before in pairwise(order[::-1]):
            out[before] = max(min(out[before], out[after] - least), low)
    return [round(p, 1) for p in out]
