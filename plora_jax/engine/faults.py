"""Fault points: places where tests, by an environment variable, make a process die or fail as machines do.

PLORA_FAULT holds `point[:n]=action`, several separated by commas: the n-th time (default: the first; `*`: each) that
this process reaches the point, the action happens. Actions: `kill` and `term` (the signals, to itself), `exit` (at
once, no clean-up), `error`, `oom` (as XLA reports a full device), `enospc` (a full disk), `wait`. `kill+20` waits 20
ms, in the background; `wait+20` waits them there and then, as a slow device would.
With PLORA_FAULT_ONCE=DIR each entry happens once over all processes that share DIR, restarted ones included.
"""

import errno
import os
import re
import signal
import threading
import time
from pathlib import Path

_ENTRY = re.compile(r"([\w.-]+)(?::(\d+|\*))?=(kill|term|exit|error|oom|enospc|wait)(?:\+(\d+))?")

_entries: dict[tuple[str, str], tuple[str, int, str]] = {}  # point, n -> action, delay in ms, entry
_reached: dict[str, int] = {}
_once: Path | None = None


def arm(spec: str, once: str | None = None) -> None:
    """Replace the fault points of this process, and count from zero; ValueError names an entry that is none."""
    global _once
    _entries.clear()
    _reached.clear()
    _once = Path(once) if once else None
    for entry in filter(None, (part.strip() for part in spec.split(","))):
        if not (match := _ENTRY.fullmatch(entry)):
            raise ValueError(f"PLORA_FAULT: {entry!r} is not point[:n]=action[+ms]")
        point, n, action, delay = match.groups()
        _entries[point, n or "1"] = action, int(delay or 0), entry


def fault(point: str) -> None:
    """Act as PLORA_FAULT says for this point; do nothing where it does not name it."""
    if not _entries:
        return
    _reached[point] = _reached.get(point, 0) + 1
    for found in filter(None, (_entries.get((point, n)) for n in ("*", str(_reached[point])))):
        action, delay, entry = found
        if _first(entry):
            if action == "wait":
                time.sleep(delay / 1000)
            elif delay:
                threading.Timer(delay / 1000, _act, (action, entry)).start()
            else:
                _act(action, entry)


def _first(entry: str) -> bool:
    if _once is None:
        return True
    _once.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(_once / entry, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _act(action: str, entry: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "exit":
            os._exit(70)
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"PLORA_FAULT {entry}")
        case "oom":
            import jax

            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes. [PLORA_FAULT {entry}]"
            )
        case _:
            raise RuntimeError(f"PLORA_FAULT {entry}")


arm(os.environ.get("PLORA_FAULT", ""), os.environ.get("PLORA_FAULT_ONCE"))
