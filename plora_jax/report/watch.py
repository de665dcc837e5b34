"""`plora watch RUN`: how a run stands, live in the terminal; elsewhere a line now and then. It only reads."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plora_jax.engine.progress import LINE_EVERY_S, clock, make_console
from plora_jax.report.runfiles import RunFiles, job_of, kind, number
from plora_jax.report.runview import RunView, read_view
from plora_jax.report.spans import ENDS
from plora_jax.report.stats import label

EVERY_S = 1.0
BOARD_ROWS, EVENT_ROWS = 10, 6
SHORT = {"learning_rate": "lr", "batch_size": "batch", "weight_decay": "decay"}
STYLES = {"completed": "green", "failed": "red", "running": "cyan", "stopped": "dim", "waiting": "dim"}
TOLD = ("started", "finished", "interrupted", "claim", "done", "lost", "worker_lost", "limit", "added", *ENDS)


def watch(run: Path, once: bool = False, console: Console | None = None) -> int:
    """Show a run until it goes on no more, or `once`; return 0, or 1 if it was left unfinished.

    Raises:
      UserError: `run` is no run directory.
    """
    console, files = console or make_console(), RunFiles(run)
    view = read_view(files)
    if once:
        console.print(snapshot(view, console.height if console.is_terminal else 60))
        return 0
    if console.is_terminal:
        with Live(snapshot(view, console.height), console=console, auto_refresh=False) as live:
            while view.state == "running":
                time.sleep(EVERY_S)
                view = read_view(files)
                live.update(snapshot(view, console.height), refresh=True)
    else:
        said = ""
        while True:
            if (line := summary(view)) != said:
                console.print(Text(line), soft_wrap=True)
            if view.state != "running":
                break
            said = line
            time.sleep(LINE_EVERY_S)
            view = read_view(files)
    return int(view.state != "finished")


def done_share(view: RunView) -> float:
    """Return how much of the jobs' own training is over; an ended job counts in full."""
    parts = [1.0 if job.status in ENDS else min(job.fraction or 0.0, 1.0) for job in view.jobs]
    return sum(parts) / len(parts) if parts else 0.0


def rate(view: RunView) -> float:
    """Return the tokens a second of all workers now; 0 where none says."""
    if view.state != "running":
        return 0.0
    return sum(number(worker.get("tokens_per_s")) or 0.0 for worker in view.workers.values())


def left(view: RunView) -> float | None:
    """Return the seconds left at the pace so far; None where too little is done to tell."""
    share, took = done_share(view), view.clock(view.last)
    return took * (1 - share) / share if view.state == "running" and share >= 0.02 and took else None


def plain(value: Any, most: int = 60) -> str:
    """Return text that is safe in a terminal: what cannot be printed is replaced, what is long is cut."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in str(value))
    return text if len(text) <= most else text[: most - 1] + "…"


def counts(view: RunView) -> str:
    """Return the jobs by how they stand."""
    by = Counter(job.status for job in view.jobs)
    order = (*ENDS, "running", "unfinished", "waiting")
    return ", ".join(f"{by[status]} {status}" for status in order if by[status]) or "no job is known yet"


def summary(view: RunView) -> str:
    """Return the whole of it in one line."""
    parts = [f"{view.state}: {100 * done_share(view):.0f}% of {len(view.jobs)} jobs", counts(view)]
    if tokens := rate(view):
        parts.append(f"{tokens:,.0f} tokens/s")
    if (seconds := left(view)) is not None:
        parts.append(f"about {clock(seconds)} left")
    best = next((job for job in view.jobs if job.score is not None and job.status != "failed"), None)
    if best:
        parts.append(f"best {plain(view.metric, 24)} {best.score:.3f} {plain(best.job_id)}")
    return ", ".join(parts)


def snapshot(view: RunView, height: int) -> RenderableType:
    """Return everything at once, cut to the height of the terminal: head, workers, leaderboard, latest events."""
    head = Text.assemble(
        (plain(view.name), "bold"), "  ", (view.state, "green" if view.state == "finished" else "")
    )
    if view.state == "stopped":
        head.append(" before it was finished; go on with plora sweep … --resume", "yellow")
    figures = [counts(view), f"{clock(view.clock(view.last))} so far"]
    if tokens := rate(view):
        figures.append(f"{tokens:,.0f} tokens/s")
    if (seconds := left(view)) is not None:
        figures.append(f"about {clock(seconds)} left")
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=done_share(view), width=36), Text(f"{100 * done_share(view):.0f}%")
    )
    parts: list[RenderableType] = [head, bar, Text(", ".join(figures), "dim"), Text("")]
    free = height - 8
    if view.workers and view.state != "finished":
        shown = max(min(len(view.workers), free // 3), 1)
        parts += [_workers(view, shown), Text("")]
        free -= shown + 3
    events = _events(view, max(min(EVENT_ROWS, free // 3), 1))
    board = max(min(BOARD_ROWS, free - len(events) - 4), 1)
    if any(job.score is not None for job in view.jobs):
        parts += [_board(view, board), Text("")]
    parts += events
    return Group(*parts)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for name, justify in columns:
        table.add_column(Text(name), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _workers(view: RunView, most: int) -> Table:
    table = _table(
        ("worker", "left"), ("pack", "left"), ("", "left"), ("", "right"), ("phase", "left"),
        ("tokens/s", "right"), ("step", "right"), ("memory", "right"), ("seen", "right"),
    )  # fmt: skip
    for name, worker in list(view.workers.items())[:most]:
        done, total = number(worker.get("work_done")) or 0.0, number(worker.get("work_total")) or 0.0
        share = min(max(done / total, 0.0), 1.0) if total else 0.0
        used, limit = number(worker.get("device_bytes")), number(worker.get("device_limit_bytes"))
        used = used if used is not None else number(worker.get("host_rss_bytes"))
        memory = (
            ""
            if used is None
            else f"{used / 2**30:.1f}" + (f"/{limit / 2**30:.0f}" if limit else "") + " GiB"
        )
        tokens, step, when = (number(worker.get(key)) for key in ("tokens_per_s", "step_ms", "time"))
        ago = max(view.last - when, 0.0) if when is not None else None
        table.add_row(
            Text(plain(name, 16)), Text(plain(worker.get("pack") or "", 16)), ProgressBar(1.0, share, 20),
            f"{100 * share:.0f}%" if total else "", Text(plain(worker.get("phase") or "", 24)),
            f"{tokens:,.0f}" if tokens is not None else "", f"{step:,.0f} ms" if step is not None else "", memory,
            "" if ago is None else Text(f"{clock(ago)} ago", "yellow" if ago > 30 else "dim"),
        )  # fmt: skip
    return table


def _board(view: RunView, most: int) -> Table:
    names = [name for name in view.varied() if any(job.fields.get(name) is not None for job in view.jobs)][:5]
    fields = [(SHORT.get(name, name), "right") for name in names]
    table = _table(
        ("", "right"),
        ("job", "left"),
        (plain(view.metric, 24), "right"),
        ("loss", "right"),
        *fields,
        ("", "left"),
    )
    base = [number(view.base.get(name)) for name in ("score", "loss")]
    if base[0] is not None:
        table.add_row("", Text("base model", "yellow"), *map(_fixed, base), *[""] * len(names), "")
    for place, job in enumerate([job for job in view.jobs if job.score is not None][:most], 1):
        so_far = (
            f" {100 * job.fraction:.0f}%" if job.fraction is not None and job.status != "completed" else ""
        )
        table.add_row(
            str(place), Text(plain(job.job_id, 40)), _fixed(job.score), _fixed(job.loss),
            *[Text(plain(label(job.fields.get(name)), 14)) for name in names],
            Text(plain(job.status) + so_far, STYLES.get(job.status, "")),
        )  # fmt: skip
    return table


def _fixed(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _events(view: RunView, most: int) -> list[RenderableType]:
    lines = [line for line in view.log if kind(line) in TOLD]
    return [Text(tell(view, line), "dim", no_wrap=True, overflow="ellipsis") for line in lines[-most:]]


def tell(view: RunView, line: dict[str, Any]) -> str:
    """Say in a line what an event or a decision was, and when on the run's clock."""
    when, what = number(line.get("time")), kind(line)
    said = {
        "claim": "took",
        "done": "finished",
        "worker_lost": "was lost",
        "limit": "ran out of device memory",
    }
    words = [clock(view.clock(when)).rjust(7) if when is not None else " " * 7]
    if what in ("claim", "worker_lost") and _told(line, "worker"):
        words.append(f"worker {plain(line['worker'])}")
    words += [plain(job_of(line), 40)] if job_of(line) else []
    words.append(said.get(what, what))
    words += [f"{key} {plain(line[key])}" for key in ("pack", "jobs", "policy", "m") if _told(line, key)]
    words += [f"– {plain(line[key], 100)}" for key in ("reason", "cause") if _told(line, key)]
    return " ".join(words)


def _told(line: dict[str, Any], key: str) -> bool:
    return isinstance(line.get(key), str | int | float) and line[key] != ""
