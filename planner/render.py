"""A plan for the eye: a table of packs and a Gantt chart in plain text."""

from collections.abc import Sequence

from planner.plan import Pack, Plan

WIDTH = 60
GLYPHS = "█▓▒░"


def duration(seconds: float | None) -> str:
    """Write seconds as a person would: 42 s, 12.5 min, 3.2 h."""
    if seconds is None:
        return "-"
    for limit, scale, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def number_of(things: int, name: str) -> str:
    """Write how many there are of a thing: 1 pack, 2 packs."""
    return f"{things} {name}{'' if things == 1 else 's'}"


def device_range(devices: tuple[int, ...]) -> str:
    """Write a run of device numbers: 4 or 4-7."""
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"


def render_plan(plan: Plan, width: int = WIDTH) -> str:
    """Return the plan as text: summary, table of packs with memory against the limit, Gantt chart, notes."""
    lines = [*summary(plan), "", *table(plan), "", *gantt(plan, width)]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def summary(plan: Plan) -> list[str]:
    """Return the lines that name problem, makespan, bound and baselines."""
    lines = [
        f"{number_of(len(plan.jobs), 'job')} of {plan.model} ({plan.precision}) on {plan.hardware}: "
        f"{number_of(len(plan.packs), 'pack')}, method {plan.method}, planned in {plan.planning_s:.2f} s",
        f"makespan {duration(plan.makespan_s)}, lower bound {duration(plan.lower_bound_s)} ({plan.bound}), "
        f"gap {100 * plan.gap:.1f} %" + (", search cut short" if plan.truncated else ""),
    ]
    if plan.expected_s is not None:
        lines.append(
            f"with early stopping {duration(plan.expected_s)} expected (simulated); the makespan has no stops"
        )
    if plan.whole is not None:
        lines.append(
            f"planned rung by rung; as whole jobs {duration(plan.whole['expected_s'])} expected, "
            f"{duration(plan.whole['makespan_s'])} without stops; the bound is one on whole jobs"
        )
    known = {name: value for name, value in plan.baselines.items() if value is not None}
    if known:
        parts = [
            f"{name.removesuffix('_s')} {duration(v)} ({v / plan.makespan_s:.2f}×)"
            for name, v in known.items()
        ]
        lines.append("baselines: " + ", ".join(parts))
    return lines


def table(plan: Plan) -> list[str]:
    """Return one line a pack."""
    by_rung = any(pack.rung is not None for pack in plan.packs)
    head = (
        "pack",
        *(["rung"] if by_rung else []),
        "devices",
        *(["type"] if plan.is_mixed else []),
        "jobs",
        "J",
        "m",
        "rank",
        "length",
        "keep",
        "step",
        "steps",
        "start",
        "end",
        "memory",
    )
    rows = [head]
    for n, pack in enumerate(plan.packs):
        share = 100 * pack.memory_bytes / pack.memory_limit_bytes
        rows.append(
            (
                str(n), *([str(pack.rung)] if by_rung else []),
                device_range(pack.devices), *([pack.device] if plan.is_mixed else []),
                str(len(pack.jobs)), str(pack.J), str(pack.m),
                str(max(pack.slots)), str(max(pack.length_buckets)), pack.policy,
                f"{1000 * pack.step_s:.0f} ms", str(pack.steps), duration(pack.start_s), duration(pack.end_s),
                f"{pack.memory_bytes / 2**30:.1f}/{pack.memory_limit_bytes / 2**30:.1f} GiB ({share:.0f} %)",
            )
        )  # fmt: skip
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line a row, its cells under one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def gantt(plan: Plan, width: int = WIDTH) -> list[str]:
    """Return one bar a device group; each pack has its own shade, its number is written into it."""
    groups: dict[tuple[int, ...], list[tuple[int, Pack]]] = {}
    for n, pack in enumerate(plan.packs):
        groups.setdefault(pack.devices, []).append((n, pack))
    scale = width / plan.makespan_s if plan.makespan_s else 0.0
    names = {on: device_range(on) for on in groups}
    if plan.is_mixed:
        names = {on: f"{name} {groups[on][0][1].device}" for on, name in names.items()}
    label = max(map(len, names.values()))
    lines = []
    for on, packs in groups.items():
        bar = [" "] * width
        for shade, (n, pack) in enumerate(packs):
            a, b = int(pack.start_s * scale), max(int(pack.end_s * scale), int(pack.start_s * scale) + 1)
            for x in range(a, min(b, width)):
                setup = x < (pack.start_s + pack.setup_s) * scale - 0.5
                bar[x] = "·" if setup else GLYPHS[shade % len(GLYPHS)]
            name = str(n)
            middle = (a + min(b, width)) // 2 - len(name) // 2
            if b - a >= len(name) + 2:
                bar[middle : middle + len(name)] = name
        lines.append(f"device {names[on].rjust(label)} |{''.join(bar)}|")
    lines.append(f"{' ' * (8 + label)}0{duration(plan.makespan_s).rjust(width)}  (· loading and compiling)")
    return lines
