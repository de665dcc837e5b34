"""Learning rates at every optimizer step against transformers' schedules (`scripts/goldens/peft.py`)."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.jobs import Job
from plora_jax.training.optim import hyper, learning_rate, warmup_steps
from tests.peft_cases import GOLDENS

CASES = json.loads((GOLDENS / "peft.json").read_text())["schedules"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['scheduler']}-{c['warmup']}-{c['total']}")
def test_rates_equal_transformers_at_every_step(case: dict) -> None:
    job = Job(learning_rate=2e-4, scheduler=case["scheduler"], warmup_steps=case["warmup"])
    h = hyper(job, case["total"])
    ours = jax.vmap(lambda step: learning_rate(h, step))(jnp.arange(case["total"]))
    np.testing.assert_allclose(ours, 2e-4 * np.array(case["factor"]), rtol=1e-6, atol=1e-7 * 2e-4)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_corners_by_hand(name: str) -> None:
    """Steps 0, 1, the end of warmup and the last, for 4 steps of warmup in 20."""
    job = Job(learning_rate=1.0, scheduler=name, warmup_ratio=0.16)
    assert warmup_steps(job, 20) == 4  # 3.2, rounded up
    last = {"constant": 1.0, "linear": 1 / 16, "cosine": (1 + math.cos(math.pi * 15 / 16)) / 2}[name]
    for step, rate in ((0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (19, last)):
        assert float(learning_rate(hyper(job, 20), jnp.int32(step))) == pytest.approx(rate, rel=2e-5)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_without_warmup_the_first_step_has_the_full_rate(name: str) -> None:
    job = Job(learning_rate=3e-4, scheduler=name, warmup_steps=0, warmup_ratio=0.5)  # 0 is given, not unset
    assert float(learning_rate(hyper(job, 10), jnp.int32(0))) == pytest.approx(3e-4)
