"""Ctrl-C and SIGTERM end a run with their own exit codes, even where something swallows the first exception."""

import os
import signal
import subprocess
import sys
import time

import pytest

from plora_jax import cli
from plora_jax.errors import UserError

CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_swallowed_signal_is_raised_again(monkeypatch, number, code, capsys):
    def swallowing(args):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except BaseException:
            pass
        for _ in range(100):
            time.sleep(0.1)
        raise UserError("the signal was lost")

    monkeypatch.setattr(cli, "_doctor", swallowing)
    before = signal.getsignal(number)
    assert cli.main(["doctor"]) == code
    assert signal.getsignal(number) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), CODES)
def test_the_process_ends_with_the_code(number, code):
    program = f"""
import os, sys, time
from plora_jax import cli
cli._doctor = lambda args: (os.kill(os.getpid(), {int(number)}), time.sleep(30))
sys.argv = ["plora", "doctor"]
cli.command()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
