"""The geometry of a report's figures in time: the plan as predicted and as run, throughput and memory."""

from typing import Any

import numpy as np

from plora_jax.report.figures import binned, path, shades
from plora_jax.report.runfiles import entries, mappings, number
from plora_jax.report.runview import RunView
from plora_jax.report.scale import Scale, apart, make_scale, span, time_ticks

WIDTH, LEFT, RIGHT = 1080, 92, 84
LANES_PX = 380.0  # about the height of a Gantt chart
CHART_PX = 150
MAX_POINTS = 360
NAMED = 8  # workers that have a colour and a name of their own


def timeline(view: RunView) -> dict[str, Any]:
    """Return both Gantt charts and the charts of samples on one time axis, in seconds of the run."""
    packs = mappings(view.plan.get("packs"))
    makespan = number(view.plan.get("makespan_s")) or 0.0
    took, bound = view.clock(view.last), number(view.plan.get("lower_bound_s"))
    across = make_scale([0.0, max(makespan, took, 1e-3)], LEFT, WIDTH - RIGHT, pad=0.0)
    planned, ran = _planned(view, packs), _ran(view)
    rows = max(sum(lane["slots"] for lane in planned), sum(lane["slots"] for lane in ran), 1)
    px = float(np.clip(LANES_PX / rows, 2.0, 11.0))
    return {
        "width": WIDTH, "left": LEFT, "right": WIDTH - RIGHT, "ticks": time_ticks(across),
        "planned": _draw(planned, across, px) if planned else None,
        "ran": _draw(ran, across, px) if ran else None,
        "makespan_s": makespan, "took_s": took,
        "spare_s": None if bound is None else max(makespan - bound, 0.0),
        "pauses": [(across(view.clock(a)), span(b - a)) for a, b in view.pauses],
        "rates": _samples(view, across, "tokens_per_s"),
        "memory": _samples(view, across, "device_bytes") or _samples(view, across, "host_rss_bytes"),
    }  # fmt: skip


def _planned(view: RunView, packs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    colours = shades(view.jobs)
    lanes: dict[str, dict[str, Any]] = {}
    several = len({str(pack.get("device")) for pack in packs}) > 1
    for at, pack in enumerate(packs):
        devices, slots = entries(pack.get("devices")) or [0], max(len(entries(pack.get("slots"))), 1)
        name = f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}–{devices[-1]}"
        lane = lanes.setdefault(name, {"name": name, "slots": 1, "bars": [], "spans": []})
        lane["slots"] = max(lane["slots"], slots)
        start, end = (number(pack.get(key)) or 0.0 for key in ("start_s", "end_s"))
        kind = f" on {pack.get('device')}" if several else ""
        tip = f"pack {at + 1}{kind}: {len(entries(pack.get('jobs')))} jobs, {span(start)} to {span(end)}"
        lane["spans"].append({"start": start, "end": end, "tip": tip, "how": "done", "slots": slots})
        for one in mappings(pack.get("assign")):
            a, b, slot = (number(one.get(key)) or 0.0 for key in ("start_s", "end_s", "slot"))
            name = str(one.get("job_id"))
            lane["bars"].append(_bar(name, int(slot), a, b, colours.get(name, "none")))
    return list(lanes.values())


def _ran(view: RunView) -> list[dict[str, Any]]:
    colours = shades(view.jobs)
    lanes: dict[str, dict[str, Any]] = {}
    sizes: dict[str, int] = {}
    for bar in view.bars:
        sizes[bar.pack] = max(sizes.get(bar.pack, 1), bar.slot + 1)
    for one in sorted(view.spans, key=lambda one: (one.worker, one.start)):
        named = f"worker {one.worker}" if one.worker.isdecimal() else one.worker
        lane = lanes.setdefault(one.worker, {"name": named, "slots": 1, "bars": [], "spans": []})
        slots = sizes.get(one.pack, 1)
        lane["slots"] = max(lane["slots"], slots)
        again = f", attempt {one.attempt}" if one.attempt > 1 else ""
        how = f"; lost: {one.cause}" if one.how == "lost" else ""
        tip = f"{named}, {one.pack}{again}: {span(one.start)} to {span(one.end)}{how}"
        lane["spans"].append({"start": one.start, "end": one.end, "tip": tip, "how": one.how, "slots": slots})
    for bar in view.bars:
        item = _bar(bar.job_id, bar.slot, bar.start, bar.end, colours.get(bar.job_id, "none"))
        lanes[bar.worker]["bars"].append(item)
    return list(lanes.values())


def _bar(job: str, slot: int, start: float, end: float, colour: str) -> dict[str, Any]:
    tip = f"{job}: {span(start)} to {span(end)}, slot {slot}"
    return {"job": job, "slot": slot, "start": start, "end": end, "class": colour, "tip": tip}


def _draw(lanes: list[dict[str, Any]], across: Scale, px: float) -> dict[str, Any]:
    """Give every bar and span its rectangle; lanes stand below one another, a row a slot."""
    top, drawn = 4.0, []
    for lane in lanes:
        bars = [
            item
            | {"x": across(item["start"]), "w": _width(item, across), "y": round(top + item["slot"] * px, 1)}
            for item in lane["bars"]
        ]
        spans = [
            item
            | {
                "x": across(item["start"]),
                "w": _width(item, across),
                "y": top,
                "h": round(item["slots"] * px, 1),
            }
            for item in lane["spans"]
        ]
        height = max(lane["slots"] * px, 12.0)
        drawn.append(
            {"name": lane["name"], "bars": bars, "spans": spans, "middle": round(top + height / 2, 1)}
        )
        top = round(top + height + 10.0, 1)
    return {"lanes": drawn, "height": top, "bar": round(px - (1.0 if px > 4 else 0.4), 1)}


def _width(item: dict[str, Any], across: Scale) -> float:
    return round(max(across(item["end"]) - across(item["start"]), 0.8), 1)


def _samples(view: RunView, across: Scale, name: str) -> dict[str, Any] | None:
    """Return one chart: a line a worker; of rates the means of short times, of memory the highest values."""
    lines: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    limit = 0.0
    for worker, sample in view.samples.items():
        good = np.isfinite(sample[name])
        if good.any():
            x, y = sample["time"][good], sample[name][good]
            if name == "tokens_per_s":
                lines[worker] = binned(x, y, np.ones_like(y), MAX_POINTS)
            else:
                lines[worker] = _highest(x, y / 2**30, MAX_POINTS)
                limits = sample["device_limit_bytes"]
                if name == "device_bytes" and np.isfinite(limits).any():
                    limit = max(limit, float(np.nanmax(limits)) / 2**30)
    if not lines:
        return None
    top = max([float(np.nanmax(y)) for _, y in lines.values()] + [limit])
    up = make_scale([0.0, top or 1.0], CHART_PX - 8, 10, pad=0.06)
    named = len(lines) <= NAMED
    texts = (
        [(f"worker {w}" if w.isdecimal() else w, f"c{at}") for at, w in enumerate(lines)]
        if named
        else [(f"{len(lines)} workers", "c0")]
    )
    ends = [up(float(y[-1])) for _, y in lines.values()]
    ends = ends if named else [float(np.median(ends))]
    if limit:
        texts, ends = [*texts, (f"limit {limit:.4g}", "limit")], [*ends, up(limit)]
    right = max(across(float(x[-1])) for x, _ in lines.values())
    return {
        "of": name, "height": CHART_PX, "y": up.ticks(3), "limit": up(limit) if limit else None,
        "mean": float(np.mean([np.nanmean(y) for _, y in lines.values()])), "top": top,
        "lines": [
            {"worker": worker, "class": f"c{at}" if named else "c0", "d": path(x, y, across, up)}
            for at, (worker, (x, y)) in enumerate(lines.items())
        ],
        "labels": [(y, *text) for y, text in zip(apart(ends, 13, 12, CHART_PX - 8), texts, strict=True)],
        "right": right,
    }  # fmt: skip


def _highest(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.unique(np.linspace(0, len(x), min(most, len(x)), endpoint=False).astype(int))
    return x[np.append(starts[1:], len(x)) - 1], np.maximum.reduceat(y, starts)
