"""Settings that must stand before JAX starts its CPU device, and which examples hypothesis draws."""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

UNOPTIMIZED = "jax_disable_most_optimizations"
OPTIMIZED = ("test_quickstart.py", "test_resume.py", "test_smollm2.py")

# Interpreted GPU kernels block one CPU worker per simulated warpgroup: with a pool of two cores they would deadlock.
os.environ.setdefault("NPROC", "16")
# No test leaves compiled programs in the user's cache or finds some there; test_compiled.py has its own directory.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

# Most tests compile more than they compute: LLVM's optimizations are a third of their time.
os.environ.setdefault(UNOPTIMIZED.upper(), "true")
# XLA's newer emitters of fusions take most of the rest; its older ones compile a small step in less than half the time.
OLDER = " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
if OLDER not in (flags := os.environ.get("XLA_FLAGS", "")):  # as a worker's already holds it
    os.environ["XLA_FLAGS"] = flags + OLDER

# Where Python may write no bytecode, each process that a test starts would compile all that it imports, for seconds.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault(
        "PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    )
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that an unlucky draw fails nobody's change. To look for new failures at random:
# PLORA_EXAMPLES=300 pytest tests/planner (300 examples a property there; elsewhere each test's own number).
settings.register_profile("same", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile("random" if os.environ.get("PLORA_EXAMPLES") else "same")

RERUN = ("test_engine.py", "test_handover.py", "test_packrun.py", "test_replan.py", "test_resume.py")
RERUN += ("test_rungs.py", "test_types.py")

LONGEST = ("test_quickstart.py", "test_bench.py", "test_step.py", "test_kept.py", "test_packrun.py")
LONGEST += ("test_engine.py", "test_recompute.py")


@pytest.fixture(autouse=True, scope="module")
def optimizations(request):
    """Compile what processes that some files start run as users' programs are compiled; and what the files run
    themselves, but for the emitters of fusions, which a process reads once.
    """
    if request.path.name not in OPTIMIZED:
        yield
        return
    import jax  # after the settings above

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNOPTIMIZED.upper(), "false")
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(OLDER, ""))
        before = jax.config.read(UNOPTIMIZED)
        jax.config.update(UNOPTIMIZED, False)
        jax.clear_caches()  # of functions that other files had compiled
        yield
        jax.config.update(UNOPTIMIZED, before)


@pytest.fixture(autouse=True, scope="module")
def programs(request, tmp_path_factory):
    """Keep the programs of files that run one sweep again and again, as users' are kept."""
    if request.path.name not in RERUN:
        yield
        return
    from tests.programs import kept_in

    with kept_in(tmp_path_factory.mktemp("programs")):
        yield


def pytest_collection_modifyitems(items):
    """Put the files that take longest first, so that none is left for the end when files run side by side."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
