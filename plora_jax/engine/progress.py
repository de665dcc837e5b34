"""Progress for people: a bar with tokens/s and time left on a terminal, now and then a line elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

LINE_EVERY_S = 30.0


def clock(seconds: float) -> str:
    """Write a time as minutes and seconds, or hours and minutes."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"


def make_console() -> Console:
    """Return a console on standard output; where that is no terminal, lines are as wide as a log can bear."""
    console = Console(emoji=False)  # a path or a name with :cat: in it is no picture
    return console if console.is_terminal else Console(width=160, emoji=False)


def say(console: Console, text: str) -> None:
    """Print text as it is: no markup, no colours of its own, no line breaks beside its own."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


class Progress:
    """Show how far a sweep has come, as a context manager.

    `total` and `advance` count work in forward passes of one token, so that training and scoring add up to one time
    left; trained tokens are counted beside it and give the rate.
    """

    def __init__(self, console: Console, total: float) -> None:
        self.console, self.total = console, max(total, 1e-9)
        self.done = 0.0
        self.timed_work, self.timed_s, self.tokens, self.training_s = 0.0, 0.0, 0, 0.0
        self.said = self.last = time.monotonic()
        self.what, self.note, self.compiling = "", "", True
        self._bar: Bar | None = None
        if console.is_terminal:
            self._bar = Bar(BarColumn(), TextColumn("{task.fields[state]}"), console=console)
            self._task = self._bar.add_task("", total=self.total, state="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def phase(self, what: str) -> None:
        """Say what is being done now."""
        self.what, self.note, self.last, self.compiling = what, "", time.monotonic(), True
        self._show(always=True)

    def advance(self, work: float, tokens: int = 0, note: str = "") -> None:
        """Add work, and the real tokens that were trained in it; `note` (the latest loss, say) stays until another."""
        now = time.monotonic()
        if (
            not self.compiling
        ):  # the first of a phase takes as long as its compilation, which says nothing of the rate
            self.timed_work, self.timed_s = self.timed_work + work, self.timed_s + now - self.last
            if tokens:
                self.tokens, self.training_s = self.tokens + tokens, self.training_s + now - self.last
        self.compiling = False
        self.last = now
        self.done = min(self.done + work, self.total)
        self.note = note or self.note
        self._show()

    def _show(self, always: bool = False) -> None:
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self.done, state=self.state())
        elif always or now - self.said >= LINE_EVERY_S:
            self.said = now
            self.console.print(self.state(), soft_wrap=True, highlight=False, markup=False)

    def state(self) -> str:
        """Say what is done now, the share of all work, tokens/s over the training so far, and the time left."""
        parts = [f"{self.what}: {100 * self.done / self.total:.0f}%"]
        if self.compiling:
            parts.append("starting")
        if self.tokens:
            parts.append(f"{self.tokens / max(self.training_s, 1e-9):,.0f} tokens/s")
        if self.timed_work:
            parts.append(f"{clock(self.timed_s * (self.total - self.done) / self.timed_work)} left")
        return ", ".join([*parts, *([self.note] if self.note else [])])
