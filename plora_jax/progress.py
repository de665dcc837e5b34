"""Progress for people: a bar with tokens/s and time left on a terminal, now and then a line elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 30.0


def clock(seconds: float) -> str:
    """Write a time as minutes and seconds, or hours and minutes."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"


class Progress:
    """Show how far a stretch of work has come, as a context manager; `total` and `advance` are in `unit`."""

    def __init__(self, console: Console, what: str, total: float, unit: str = "tokens") -> None:
        self.console, self.what, self.total, self.unit = console, what, max(total, 1e-9), unit
        self.done, self.start, self.said = 0.0, time.monotonic(), time.monotonic()
        self.note = ""
        self._bar: Bar | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
            self._bar = Bar(*columns, TimeElapsedColumn(), console=console)
            self._task = self._bar.add_task(what, total=self.total, state="")

    def __enter__(self) -> "Progress":
        self.start = self.said = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        elif kind is None:
            self.console.print(f"{self.what}: {self.state()}", soft_wrap=True)

    def advance(self, amount: float, note: str = "") -> None:
        """Add to what is done; `note` (the latest loss, say) stays until another comes."""
        self.done = min(self.done + amount, self.total)
        self.note = note or self.note
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self.done, state=self.state())
        elif now - self.said >= LINE_EVERY_S:
            self.said = now
            self.console.print(f"{self.what}: {self.state()}", soft_wrap=True)

    def state(self) -> str:
        """Say the share done, the rate and the time left; the rate counts from the start of the work."""
        elapsed = max(time.monotonic() - self.start, 1e-9)
        rate = self.done / elapsed
        left = clock((self.total - self.done) / rate) if rate > 0 else "?"
        parts = [f"{100 * self.done / self.total:.0f}%", f"{rate:,.0f} {self.unit}/s"]
        parts.append(f"{clock(elapsed)} in all" if self.done >= self.total else f"{left} left")
        return ", ".join([*parts, *([self.note] if self.note else [])])
