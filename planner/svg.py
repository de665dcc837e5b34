"""A plan's Gantt chart as an SVG file: one row a device group, one bar a job in its slot."""

import re
from html import escape

from planner.plan import Plan
from planner.render import device_range, duration
from planner.several import SeveralPlan

WIDTH, LEFT, TOP = 960, 90, 46
SLOT_PX, GAP_PX = 8, 10
COLORS = {8: "#9ecae1", 16: "#6baed6", 32: "#4292c6", 64: "#2171b5", 128: "#08519c", 256: "#08306b"}


def gantt_svg(plan: Plan) -> str:
    """Return the chart: a bar's shade is its rank bucket, grey is loading and compiling, its tooltip names
    the job.
    """
    scale = (WIDTH - LEFT - 20) / max(plan.makespan_s, 1e-9)
    rows: dict[tuple[int, ...], int] = {}
    y = TOP
    for pack in plan.packs:
        if pack.devices not in rows:
            rows[pack.devices] = y
            tallest = max(other.J for other in plan.packs if other.devices == pack.devices)
            y += tallest * SLOT_PX + GAP_PX
    height = y + 30
    title = f"{len(plan.jobs)} jobs of {plan.model} on {plan.hardware}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}: {duration(plan.makespan_s)}, '
        f"bound {duration(plan.lower_bound_s)}, gap {100 * plan.gap:.1f} %</text>",
    ]
    kinds = {pack.devices: f" {pack.device}" if plan.is_mixed else "" for pack in plan.packs}
    for devices, top in rows.items():
        name = f"device {device_range(devices)}{kinds[devices]}"
        out.append(f'<text x="8" y="{top + 10}">{escape(name)}</text>')
    for pack in plan.packs:
        top = rows[pack.devices]
        x = LEFT + pack.start_s * scale
        out.append(
            f'<rect x="{x:.1f}" y="{top}" width="{max(pack.setup_s * scale, 0.5):.1f}" '
            f'height="{pack.J * SLOT_PX}" fill="#d0d0d0"><title>loading and compiling</title></rect>'
        )
        for a in pack.assign:
            color = COLORS.get(pack.slots[a.slot], "#08306b")
            tip = f"{a.job_id}: {duration(a.start_s)} to {duration(a.end_s)}, slot {a.slot}, bucket "
            out.append(
                f'<rect x="{LEFT + a.start_s * scale:.1f}" y="{top + a.slot * SLOT_PX}" '
                f'width="{max((a.end_s - a.start_s) * scale, 0.5):.1f}" height="{SLOT_PX - 1}" '
                f'fill="{color}">'
                f"<title>{escape(tip)}{pack.slots[a.slot]}</title></rect>"
            )
    bound = LEFT + plan.lower_bound_s * scale
    out.append(
        f'<line x1="{bound:.1f}" x2="{bound:.1f}" y1="{TOP - 8}" y2="{y}" '
        'stroke="#d62728" stroke-dasharray="4 3"/>'
    )
    for tick in range(6):
        x = LEFT + tick / 5 * plan.makespan_s * scale
        label = duration(tick / 5 * plan.makespan_s)
        out.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{label}</text>')
    return "\n".join([*out, "</svg>"])


def several_svg(plan: SeveralPlan) -> str:
    """Return the charts of several sweeps, one below the other, in the machine's device numbers."""
    charts, y = [], 0
    for share in plan.sweeps:
        chart = gantt_svg(share.placed)
        charts.append(chart.replace("<svg ", f'<svg y="{y}" ', 1))
        y += int(re.findall(r'height="(\d+)"', chart)[0])
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *charts, "</svg>"])
