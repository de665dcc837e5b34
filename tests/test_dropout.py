"""Dropout: what a mask is, and that backward uses the mask of forward, against plain autodiff."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.models import decoder
from plora_jax.models.decoder import Runtime
from plora_jax.training.dropout import Dropout, dropout_mask
from plora_jax.training.step import empty_pack, fresh_slot, make_load_slot, make_train_step, pack_spec
from tests.peft_cases import base_of, micro_batch
from tests.test_equivalence import JOBS, relative, rows_of, start

RATES = (0.0, 0.05, 0.5)


def mask_of(rate: float, *, seed: int = 1, epoch: int = 0, layer: int = 0, source: int = 0) -> np.ndarray:
    rows = jnp.arange(40, dtype=jnp.int32)[:, None] * jnp.ones((1, 50), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(50, dtype=jnp.int32), rows.shape)
    dropout = Dropout(jnp.int32(seed), jnp.float32(rate), jnp.int32(epoch))
    return np.asarray(dropout_mask(dropout, layer, source, rows, positions, 64))


@pytest.mark.parametrize("rate", RATES)
def test_a_mask_keeps_the_expected_share_and_scales_it(rate: float) -> None:
    mask = mask_of(rate)
    assert set(np.unique(mask)) <= {np.float32(0.0), np.float32(1 / (1 - np.float32(rate)))}
    spread = (rate * (1 - rate) / mask.size) ** 0.5  # binomial: five standard deviations
    assert abs((mask == 0).mean() - rate) <= 5 * spread
    for axis in range(3):  # no feature, position or row is always kept or always dropped
        share = (mask == 0).mean(axis=tuple(i for i in range(3) if i != axis))
        assert np.abs(share - rate).max() <= 6 * (rate * (1 - rate) / (mask.size / mask.shape[axis])) ** 0.5


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 1}, {"layer": 1}, {"source": 1}])
def test_masks_of_other_seeds_epochs_layers_and_inputs_are_independent(change: dict[str, int]) -> None:
    one, two = mask_of(0.5) == 0, mask_of(0.5, **change) == 0
    assert abs((one & two).mean() - 0.25) < 0.01


def plain_group(x: Any, ws: Any, adapters: Any, *, biases: Any, mask: Any = None, **options: Any) -> Any:
    """The formula of LoRA as autodiff differentiates it, in place of the kernels."""
    out = []
    for w, adapter, bias in zip(ws, adapters, biases, strict=True):
        y = x @ w if bias is None else x @ w + bias
        if adapter is not None:
            a, b, scale = adapter
            masked = x if mask is None else x * mask.astype(x.dtype)
            y = y + scale.astype(x.dtype) * ((masked @ a.astype(x.dtype).T) @ b.astype(x.dtype).T)
        out.append(y)
    return tuple(out)


def test_gradients_with_dropout_equal_plain_autodiff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates 0, 0.05 and 0.5 side by side in one pack, layers recomputed in the backward pass."""
    with jax.enable_x64(True):
        base = base_of(tmp_path, "llama", np.float64)
        jobs = [replace(JOBS[0], dropout=rate, batch_size=2) for rate in RATES]
        spec = pack_spec(base.config, jobs)
        assert spec.has_dropout
        batch = micro_batch([rows_of(job)[:2] for job in jobs], [False] * len(jobs), 0)

        def gradients() -> Any:
            load, state = make_load_slot(spec), empty_pack(base.config, spec, np.float64)
            for slot, job in enumerate(jobs):
                state = load(state, slot, *fresh_slot(base.config, spec, job, 10, start(base.config, job)))
            step = make_train_step(base, spec, Runtime(dtype=jnp.float64, recompute="layer"))
            state, _ = step(state, base.params, batch)
            return state.grads

        ours = gradients()
        monkeypatch.setattr(decoder, "lora_dense_group", plain_group)
        plain = gradients()
        for slot in range(len(jobs)):
            one, two = (jax.tree.map(lambda g, j=slot: g[:, j], grads) for grads in (ours, plain))
            assert relative(one, two) < 1e-12
        zero, some = (jax.tree.map(lambda g, j=slot: g[:, j], plain) for slot in (0, 1))
        assert relative(some, zero) > 0.01, "dropout changed nothing"
