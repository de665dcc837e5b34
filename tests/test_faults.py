"""Fault points act where and when they are told to, once where asked, and never otherwise."""

import errno
import os
import subprocess
import sys
import time

import jax
import pytest

from plora_jax.engine import faults
from plora_jax.engine.faults import arm, fault


@pytest.fixture(autouse=True)
def disarmed():
    """Leave no fault behind."""
    yield
    arm("")


def test_nothing_happens_unless_named():
    arm("")
    fault("step")
    arm("export=error")
    fault("step")
    assert faults._reached == {"step": 1}


def test_the_nth_time_and_no_other():
    arm("step:3=error, export=enospc")
    fault("step"), fault("step")
    with pytest.raises(RuntimeError, match="step:3=error"):
        fault("step")
    fault("step")
    with pytest.raises(OSError) as told:
        fault("export")
    assert told.value.errno == errno.ENOSPC


def test_each_time_a_slow_device():
    arm("step:*=wait+30,step:2=error")
    began = time.monotonic()
    fault("step")
    with pytest.raises(RuntimeError, match="step:2=error"):
        fault("step")
    assert 0.06 <= time.monotonic() - began < 10


def test_out_of_memory_is_what_xla_raises():
    with pytest.raises(jax.errors.JaxRuntimeError) as real:
        jax.numpy.zeros((1 << 50,), "int8").block_until_ready()
    arm("step=oom")
    with pytest.raises(jax.errors.JaxRuntimeError) as ours:
        fault("step")
    assert type(ours.value) is type(real.value)
    head = "RESOURCE_EXHAUSTED: Out of memory"
    assert str(real.value).startswith(head) and str(ours.value).startswith(head)


def test_once_over_all_restarts(tmp_path):
    for restart in range(3):
        arm("a:2=error", str(tmp_path / "once"))
        fault("a")
        if restart == 0:
            with pytest.raises(RuntimeError):
                fault("a")
        else:
            fault("a")


@pytest.mark.parametrize(
    "spec", ["step", "step=boom", "step:x=kill", "step:**=wait", "=kill", "step:2=kill+"]
)
def test_a_wrong_entry_is_named(spec):
    with pytest.raises(ValueError, match="PLORA_FAULT"):
        arm(spec)


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("term", -15), ("exit", 70), ("kill+30", -9)])
def test_a_process_ends_as_told(action, code):
    program = "import time; from plora_jax.engine.faults import fault; fault('x'); time.sleep(wait)"
    program = program.replace("wait", "9" if "+" in action else "0")
    env = {**os.environ, "PLORA_FAULT": f"x={action}"}
    assert subprocess.run([sys.executable, "-c", program], env=env, timeout=30).returncode == code
