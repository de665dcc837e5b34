"""How programs are compiled while some tests run."""

import os
import subprocess
import sys


def with_newer_emitters(*code: str) -> None:
    """Run lines of code in a process whose fusions are emitted as users' are: the older emitters round them otherwise
    in a loop."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
