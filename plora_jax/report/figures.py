"""The geometry of a report's figures about jobs: curves, parallel coordinates, knobs. Numbers only; the page draws."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plora_jax.report.runfiles import RunFiles, number
from plora_jax.report.runview import EVAL, JobView, RunView, curve
from plora_jax.report.scale import Scale, apart, make_scale
from plora_jax.report.stats import GROUPS, importance, label

SHADES = 8  # classes q0 (worst) to q7 (best) by rank; the page gives them colours
MAX_POINTS = 40_000  # of all curves of one chart together
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 300, 52, 92, 14, 36
CROSS_WIDTH, CROSS_HEIGHT = 1080, 380
MANY = 200  # more lines than this are drawn finer

Curve = tuple[np.ndarray, np.ndarray]


def shades(jobs: Sequence[JobView]) -> dict[str, str]:
    """Return each job's colour class: the rank of its score among all scores (jobs are best first)."""
    scored = [job.job_id for job in jobs if job.score is not None and job.status != "failed"]
    out = {name: f"q{SHADES - 1 - at * SHADES // len(scored)}" for at, name in enumerate(scored)}
    return {job.job_id: out.get(job.job_id, "bad" if job.status == "failed" else "none") for job in jobs}


def binned(x: np.ndarray, y: np.ndarray, weight: np.ndarray, most: int) -> Curve:
    """Return at most `most` points of a curve: weighted means of y over equal runs of points, at their last x.

    Points that are no numbers count for nothing; a run of nothing but such is a gap (NaN).
    """
    if not len(x):
        return x, y
    starts = np.unique(np.linspace(0, len(x), min(most, len(x)), endpoint=False).astype(int))
    good = np.isfinite(y)
    weight = np.where(good & np.isfinite(weight), np.maximum(weight, 1e-9), 0.0)
    total = np.add.reduceat(np.where(good, y, 0.0) * weight, starts)
    weights = np.add.reduceat(weight, starts)
    ends = np.append(starts[1:], len(x)) - 1
    with np.errstate(invalid="ignore"):
        return x[ends], np.where(weights > 0, total / weights, np.nan)


def path(x: np.ndarray, y: np.ndarray, across: Scale, up: Scale) -> str:
    """Return an SVG path; a value that is no number breaks the line, and a point by itself is a dot."""
    out: list[str] = []
    pen = "M"
    top, bottom = min(up.start, up.end) - 40.0, max(up.start, up.end) + 40.0
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if b != b:
            if pen == "L" and out[-1][0] == "M":
                out[-1] += "h0"
            pen = "M"
            continue
        out.append(f"{pen}{across(a):g} {min(max(up(b), top), bottom):g}")
        pen = "L"
    if pen == "L" and out[-1][0] == "M":
        out[-1] += "h0"
    return "".join(out)


def curves(files: RunFiles, view: RunView) -> list[dict[str, Any]]:
    """Return the charts of loss and scores over trained tokens; those of which nothing was logged are left out."""
    jobs = [job for job in view.jobs if job.status != "waiting"]
    most = int(np.clip(MAX_POINTS // max(len(jobs), 1), 24, 64))
    train: dict[str, Curve] = {}
    norms: dict[str, Curve] = {}
    score: dict[str, Curve] = {}
    loss: dict[str, Curve] = {}
    longest = max((job.tokens for job in jobs), default=0) or 1
    for job in jobs:
        steps = curve(files, job.job_id)
        tokens = np.cumsum(np.nan_to_num(steps["tokens"]))
        points = max(math.ceil(most * min(job.tokens / longest, 1.0)), 4)  # as dense for all
        train[job.job_id] = binned(tokens, steps["loss"], np.nan_to_num(steps["tokens"]), points)
        norms[job.job_id] = binned(tokens, steps["grad_norm"], np.ones_like(tokens), points)
        evals = files.columns(f"jobs/{job.job_id}/evals.jsonl", EVAL)
        if len(evals["step"]) and len(tokens):
            at = np.interp(evals["step"], np.append(0.0, steps["step"]), np.append(0.0, tokens))
            score[job.job_id], loss[job.job_id] = (at, evals["score"]), (at, evals["loss"])
    base_score, base_loss = number(view.base.get("score")), number(view.base.get("loss"))
    found = [
        _chart(view, train, "Training loss", "train", None),
        _chart(view, score, f"Held-out {view.metric.replace('_', ' ')}", "score", base_score),
    ]
    if view.metric != "loss":
        found.append(_chart(view, loss, "Held-out loss", "loss", base_loss))
    found.append(_chart(view, norms, "Gradient norm before clipping", "norm", None))
    return [chart for chart in found if chart]


def _chart(
    view: RunView, lines: dict[str, Curve], title: str, name: str, base: float | None
) -> dict[str, Any] | None:
    """Lay out one chart, worst job first so that the best lies on top; its axis leaves out the highest 2 %."""
    lines = {job: (x, y) for job, (x, y) in lines.items() if np.isfinite(y).any()}
    if not lines:
        return None
    values = np.concatenate([y[np.isfinite(y)] for _, y in lines.values()])
    high, top = float(values.max()), float(np.quantile(values, 0.98))
    low = float(values.min())
    cut = name != "score" and high > low + 1.5 * (top - low)
    ends = [
        low,
        top if cut else high,
        *([base] if base is not None and (name == "score" or base < top) else []),
    ]
    log = low > 0 and max(ends) / low > 20
    across = make_scale([0.0, max(float(x[-1]) for x, _ in lines.values())], LEFT, WIDTH - RIGHT, pad=0.0)
    up = make_scale(ends, HEIGHT - BOTTOM, TOP, log=log)
    colours, order = shades(view.jobs), [job for job in view.jobs if job.job_id in lines]
    best = order[0].job_id if order[0].score is not None else ""
    drawn = [
        {
            "job": job.job_id, "class": colours[job.job_id], "best": job.job_id == best,
            "lone": len(lines[job.job_id][0]) == 1, "d": path(*lines[job.job_id], across, up),
        }
        for job in reversed(order)
    ]  # fmt: skip
    labels = []
    if best:
        y = lines[best][1][np.isfinite(lines[best][1])]
        labels.append((float(up(float(y[-1]))), f"best {float(y[-1]):.3f}", "best"))
    if base is not None:
        beyond = " ↑" if base > up.high else " ↓" if base < up.low else ""
        labels.append((float(up(base)), f"base {base:.3f}{beyond}", "base"))
    spread = apart([min(max(at, TOP), HEIGHT - BOTTOM) for at, _, _ in labels], 15, TOP + 4, HEIGHT - BOTTOM)
    return {
        "name": name, "title": title, "log": log, "cut": int(sum(np.nanmax(y) > up.high for _, y in lines.values())),
        "x": across.ticks(4), "y": up.ticks(4), "many": len(drawn) > MANY, "lines": drawn, "up": up, "across": across,
        "base": up(base) if base is not None and up.low <= base <= up.high else None,
        "labels": [(at, text, kind) for at, (_, text, kind) in zip(spread, labels, strict=True)],
    }  # fmt: skip


def score_scale(view: RunView, bottom: float, top: float) -> Scale:
    """Return the scale of the final scores, the base model's among them, with the better end on top."""
    scores = [job.score for job in view.jobs if job.score is not None and job.status != "failed"]
    base = number(view.base.get("score"))
    near = sorted(scores, reverse=view.higher_is_better)[: max(len(scores) * 49 // 50, 1)]
    scale = make_scale([*near, *([base] if base is not None else [])], bottom, top)
    return scale if view.higher_is_better else scale._replace(start=top, end=bottom)


def parallel(view: RunView) -> dict[str, Any] | None:
    """Return the parallel coordinates of the fields that vary, the score last; failed jobs end below its axis."""
    names = [name for name in view.varied() if any(name in job.fields for job in view.jobs)]
    jobs = [job for job in view.jobs if job.score is not None or job.status == "failed"]
    if not names or len(jobs) < 2:
        return None
    top, bottom = 46.0, CROSS_HEIGHT - 44.0
    xs = np.linspace(70.0, CROSS_WIDTH - 70.0, len(names) + 1).round(1).tolist()
    heights: list[list[float]] = []
    axes = []
    for name, x in zip(names, xs, strict=False):
        ticks, ys = _axis([job.fields.get(name) for job in jobs], bottom, top)
        heights.append(ys)
        axes.append({"name": name, "x": x, "ticks": ticks, "top": top, "bottom": bottom})
    up = score_scale(view, bottom, top)
    low, high = sorted((up.start, up.end))
    ends = [
        min(max(up(job.score), low), high)
        if job.score is not None and job.status != "failed"
        else bottom + 26
        for job in jobs
    ]
    axes.append({"name": view.metric, "x": xs[-1], "ticks": up.ticks(5), "top": top, "bottom": bottom})
    base = number(view.base.get("score"))
    colours = shades(view.jobs)
    rows = [
        {
            "job": job.job_id, "class": colours[job.job_id], "best": at == 0,
            "d": "M" + "L".join(f"{x:g} {y:g}" for x, y in zip(xs, [*(h[at] for h in heights), ends[at]], strict=True)),
        }
        for at, job in enumerate(jobs)
    ]  # fmt: skip
    failed = any(job.status == "failed" for job in jobs)
    return {
        "axes": axes, "lines": rows[::-1], "failed": bottom + 26 if failed else None,
        "base": up(base) if base is not None else None, "width": CROSS_WIDTH, "height": CROSS_HEIGHT,
        "letters": max(int((CROSS_WIDTH - 140) / len(names) / 8), 4), "many": len(rows) > MANY,
    }  # fmt: skip


def _axis(values: list[Any], bottom: float, top: float) -> tuple[list[tuple[float, str]], list[float]]:
    """Return ticks and heights: few values stand evenly apart and their jobs side by side; many have a scale."""
    numeric = all(number(value) is not None for value in values)
    distinct: list[Any] = sorted({*values} if numeric else {label(value) for value in values})
    if numeric and len(distinct) > 8:
        log = distinct[0] > 0 and distinct[-1] / distinct[0] > 8
        scale = make_scale([float(v) for v in distinct], bottom, top, log=log, pad=0.02)
        return [(tick.at, tick.text) for tick in scale.ticks(5)], [scale(float(v)) for v in values]
    keys = values if numeric else [label(value) for value in values]
    gap = (bottom - top) / max(len(distinct), 1)
    middle = {value: bottom - gap * (at + 0.5) for at, value in enumerate(distinct)}
    held = {value: sum(key == value for key in keys) for value in distinct}
    seen = dict.fromkeys(distinct, 0)
    ys = []
    for key in keys:  # best first, so the best of a value lies highest
        spread = min(gap * 0.5, 3.0 * held[key])
        share = (seen[key] + 0.5) / held[key] - 0.5
        ys.append(round(middle[key] + share * spread, 1))
        seen[key] += 1
    return [(round(middle[value], 1), label(value)) for value in distinct], ys


KNOB_WIDTH, KNOB_HEIGHT = 300, 150


def knobs(view: RunView) -> dict[str, Any]:
    """Return a panel a knob, the one that explains most first: its jobs' scores by value, and the means."""
    jobs = [job for job in view.jobs if job.score is not None and job.status in ("completed", "stopped")]
    scores = np.array([job.score for job in jobs], float)
    measured = [importance(name, [job.fields.get(name) for job in jobs], scores) for name in view.varied()]
    found = sorted((one for one in measured if one), key=lambda one: -one.share)
    up = score_scale(view, KNOB_HEIGHT - 26, 8)
    inside: Callable[[float], float] = lambda y: min(max(y, 8.0), KNOB_HEIGHT - 26.0)  # noqa: E731
    panels = []
    for one in found:
        k = len(one.groups)
        xs = [44 + (KNOB_WIDTH - 52) * (g + 0.5) / k for g in range(k)]
        width = min(0.5 * (KNOB_WIDTH - 52) / k, 34.0)
        within = [0] * k
        dots = []
        for score, g in zip(scores.tolist(), one.members.tolist(), strict=True):
            shift = (within[g] * 0.618034 % 1 - 0.5) * width
            within[g] += 1
            dots.append(f"M{xs[g] + shift:.1f} {inside(up(score)):g}h0")
        means = [
            (round(x, 1), inside(up(group.mean)), group) for x, group in zip(xs, one.groups, strict=True)
        ]
        panels.append(
            {
                "of": one,
                "dots": "".join(dots),
                "means": means,
                "mean_path": "M" + "L".join(f"{x:g} {y:g}" for x, y, _ in means),
            }
        )
    return {
        "panels": panels, "y": up.ticks(3), "jobs": len(jobs), "groups": GROUPS,
        "stopped": sum(job.status == "stopped" for job in jobs),
        "failed": len(view.of_status("failed")), "width": KNOB_WIDTH, "height": KNOB_HEIGHT,
    }  # fmt: skip
