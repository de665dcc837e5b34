"""Filling several examples into a sequence changes no loss and no gradient: shown with the real decoder in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plora_jax.data.examples import DataReport, Examples
from plora_jax.data.layout import Block, Slot, lay_out
from plora_jax.data.loader import PackLoader
from plora_jax.data.shapes import Shape, choose_shapes
from plora_jax.models.config import config_from_hf
from plora_jax.models.decoder import Decoder, Runtime
from plora_jax.training.dropout import Dropout
from plora_jax.training.losses import token_losses
from tests.models.tiny import LLAMA, adapters

RUNTIME = Runtime(dtype=jnp.float64)
CONFIG = config_from_hf(LLAMA)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def rows(n=10) -> Examples:
    draw = np.random.default_rng(4)
    tokens = [draw.integers(0, 56, k).astype(np.int32) for k in draw.integers(3, 12, n)]
    trained = [draw.random(len(t)) < 0.6 for t in tokens]
    for mask in trained:
        mask[0], mask[-1] = False, True
    return Examples(tokens, trained, DataReport("made up", {}, n, 0, 0, 0, 0, 12, 12, 0, 0))


EXAMPLES = rows()


@cache
def model():
    graphdef, state = nnx.split(Decoder(CONFIG, jnp.float64))
    leaves, tree = jax.tree.flatten(state)
    draw = np.random.default_rng(5)
    return graphdef, tree.unflatten([jnp.asarray(0.3 * draw.standard_normal(x.shape)) for x in leaves])


DROPOUT = Dropout(np.int32(3), np.float64(0.3), np.int32(1))


def run(lora, params, tokens, positions, ids, trained, targets, dropout=None):
    made = nnx.merge(model()[0], params)
    hidden = made.hidden(tokens, positions, ids, lora, dropout, runtime=RUNTIME)
    return token_losses(made, hidden, trained, targets, 1024)


compiled = jax.jit(partial(run, dropout=DROPOUT))
summed = jax.jit(jax.value_and_grad(lambda *args: run(*args).sum()))


def losses(block) -> np.ndarray:
    return np.asarray(compiled(adapters(CONFIG, 4, 0.5, jnp.float64), model()[1], *block))


def by_row(block: Block) -> np.ndarray:
    """Return each example's summed loss [n]."""
    found = losses(block)
    owner = np.take_along_axis(block.rows, block.trained, axis=1)
    live = block.targets >= 0
    return np.bincount(owner[live], weights=found[live], minlength=len(EXAMPLES))


def alone() -> np.ndarray:
    one = [lay_out(EXAMPLES, np.array([i]), 1, False, Shape(12, 11)) for i in range(len(EXAMPLES))]
    return by_row(Block(*(np.concatenate(parts) for parts in zip(*one, strict=True))))


@pytest.mark.parametrize("m", [1, 3])
def test_each_examples_loss_is_the_same_packed_and_alone(m):
    packed = lay_out(EXAMPLES, np.random.default_rng(m).permutation(10), m, True, Shape(88, 70))
    assert all(len(set(r.tolist()) - {-1}) > 2 for r in packed.rows)
    np.testing.assert_allclose(by_row(packed), alone(), rtol=1e-12)


def test_the_comparison_would_see_what_goes_wrong_elsewhere():
    packed = lay_out(EXAMPLES, np.arange(10), 1, True, Shape(88, 70))
    seen_by_all = packed._replace(rows=np.where(packed.rows >= 0, 0, -1))
    owners = np.take_along_axis(packed.rows, packed.trained, axis=1)[packed.targets >= 0]
    across = np.bincount(owners, weights=losses(seen_by_all)[packed.targets >= 0])
    running_on = packed._replace(positions=np.arange(88, dtype=np.int32)[None])
    assert np.abs(across / alone() - 1)[1:].max() > 1e-3  # attention across documents
    assert (
        np.abs(by_row(running_on) / alone() - 1).max() > 1e-3
    )  # dropout's positions; rotary ones are relative


def test_an_optimizer_batch_has_the_same_loss_and_gradient_however_it_is_filled():
    def whole(m, group, fill):
        shapes = choose_shapes([(EXAMPLES, 2)], m, group=group, fill=fill, limit=1)
        loader = PackLoader([Slot(EXAMPLES, 8, 2, 1)], m, shapes, group=group, fill=fill)
        lora = adapters(CONFIG, 4, 0.5, jnp.float64)
        total, grads, count = 0.0, jax.tree.map(jnp.zeros_like, lora), 0
        for b in loader:
            loss, grad = summed(lora, model()[1], *(part[0] for part in b[:5]))
            total, grads = total + loss, jax.tree.map(jnp.add, grads, grad)
            count += int((b.targets >= 0).sum())
        loader.close()
        return total / count, count, jax.tree.leaves(grads)

    loss, count, grads = whole(1, 1, False)
    packed_loss, packed_count, packed_grads = whole(2, 8, True)
    assert packed_count == count
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-12)
    for a, b in zip(packed_grads, grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
