"""How a command refuses wrong input: one message, exit code 2, and nothing written."""

import contextlib
import io
import re
from pathlib import Path

from plora_jax.cli import main


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Return every path below a directory with its size and time of change."""
    paths = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths}


def run(*argv: str | Path) -> tuple[int, str]:
    """Run the command in this process; return its exit code and what it said on stderr."""
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
    return code, said.getvalue()


def refused(directory: Path, *argv: str | Path) -> str:
    """Run a command that must be refused, and return its one message."""
    before = listing(directory)
    code, said = run(*argv)
    assert code == 2, said
    assert listing(directory) == before
    one_message(said)
    return said


def one_message(said: str) -> None:
    """Assert that exactly one message was given, and that it is for a person."""
    first, *rest = said.rstrip("\n").split("\n")
    assert re.match(r"plora( \w+)?: \S", first), said
    assert all(line.startswith("  - ") for line in rest), said
    assert len(first) > 25 and "Traceback" not in said and "Error:" not in said, said
