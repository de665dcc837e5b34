"""The packed step: how a batch is cut and which slot a job sits in change nothing but rounding."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.adapters import init_adapter, scales
from plora_jax.data.examples import DataReport, Examples
from plora_jax.data.layout import Slot
from plora_jax.data.loader import PackLoader
from plora_jax.data.shapes import choose_shapes
from plora_jax.jobs import Job
from plora_jax.models.decoder import LoRA, Runtime
from plora_jax.models.load import load_base
from plora_jax.training import step as packed
from plora_jax.training.batch import Batch
from plora_jax.training.dropout import Dropout, dropout_mask
from plora_jax.training.trainer import Work, train_pack
from tests.models.tiny import LLAMA
from tests.programs import with_newer_emitters


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return random_base(tmp_path_factory.mktemp("model"))


def random_base(folder):
    """Give a two-layer Llama with random weights, large enough that its logits differ."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    base = load_base(str(folder), random_weights=True, precision="fp32", seed=1)
    params = jax.tree.map(lambda leaf: leaf * 5 if leaf.ndim > 2 else leaf, base.params)
    return type(base)(base.name, base.config, base.graphdef, params, None)


def examples(n=11, seed=0):
    """Make n rows of 5 to 12 tokens; the number of trained tokens varies from 1 to all but one."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 56, random.integers(5, 13)).astype(np.int32) for _ in range(n)]
    trained = [np.arange(len(t)) >= random.integers(1, len(t)) for t in tokens]
    return Examples(tokens, trained, DataReport("rows", {"text": n}, n, 0, 0, 0, 0, 16, 12, 0, 0))


ROWS = examples()


def train(base, jobs, m, slots=None, queues=None, rows=ROWS):
    """Train jobs (one a slot, or as `queues` says) and return {job: (adapter leaves, losses)}."""
    spec = packed.pack_spec(base.config, jobs, slots=slots)
    lines: dict = {job.job_id: [] for job in jobs}
    queues = queues or [[Work(job, rows)] for job in jobs]
    shapes = choose_shapes([(rows, 0)], m, limit=1)
    trained = train_pack(
        base, spec, queues, m, shapes, on_step=lambda job, line: lines[job.job_id].append(line["loss"])
    )
    return {t.job.job_id: (jax.tree.leaves(t.adapter), lines[t.job.job_id]) for t in trained}


def distance(one, two):
    """Return how far two adapters are apart, relative to the second's norm."""
    apart = sum(float(np.square(np.float64(a) - b).sum()) for a, b in zip(one, two, strict=True))
    return np.sqrt(apart / sum(float(np.square(np.float64(b)).sum()) for b in two))


def reference_first_step(base, job, rows, which):
    """Compute loss and gradient norm of one optimizer batch from whole logits of its padded examples."""
    adapter, scale = init_adapter(base.config, job), scales(base.config, job)
    tokens, trained = np.zeros((len(which), 12), np.int32), np.zeros((len(which), 12), bool)
    for b, i in enumerate(which):
        tokens[b, : len(rows.tokens[i])], trained[b, : len(rows.tokens[i])] = rows.tokens[i], rows.trained[i]
    lengths = np.array([len(rows.tokens[i]) for i in which])
    segments = np.where(np.arange(12) < lengths[:, None], np.arange(len(which))[:, None], -1)

    @jax.jit
    @jax.value_and_grad
    def total(weights):
        sites = {name: LoRA(w.a, w.b, scale[name]) for name, w in weights.items()}
        at = jnp.broadcast_to(jnp.arange(12), tokens.shape)
        log_p = jax.nn.log_softmax(base.model().logits(base.model().hidden(tokens, at, segments, sites)))
        of_next = jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return -jnp.where(trained[:, 1:], of_next, 0).sum() / trained[:, 1:].sum()

    loss, grads = total(adapter)
    return float(loss), float(np.sqrt(sum(np.square(np.float64(g)).sum() for g in jax.tree.leaves(grads))))


@pytest.mark.parametrize("m", [1, 2, 4])
def test_the_batch_is_normalised_as_a_whole_however_it_is_cut(base, m):
    from plora_jax.data.order import order

    job = Job(rank=4, batch_size=4, learning_rate=0.01, scheduler="constant", max_grad_norm=0)
    spec = packed.pack_spec(base.config, [job])
    state = packed.init_pack(base, [job], total_steps=[3], spec=spec)
    step = packed.make_train_step(base, spec)
    loader = PackLoader([Slot.of(job, ROWS)], m, choose_shapes([(ROWS, 0)], m, limit=1))
    got = []
    for batch in loader:
        state, metrics = step(state, base.params, batch)
        if metrics.closed[0]:
            got.append((float(metrics.loss[0]), float(metrics.grad_norm[0]), int(metrics.tokens[0])))
    loader.close()
    first = order(0, 0, 11)[:4]
    loss, norm = reference_first_step(base, job, ROWS, first)
    assert got[0][0] == pytest.approx(loss, rel=1e-5) and got[0][1] == pytest.approx(norm, rel=1e-4)
    last = order(0, 0, 11)[8:]  # three rows of four: divided by their own tokens
    assert [tokens for *_, tokens in got] == [
        sum(int(ROWS.trained[i].sum()) for i in part) for part in (first, order(0, 0, 11)[4:8], last)
    ]


def test_a_job_in_a_pack_equals_the_job_alone(base):
    jobs = [
        Job(rank=4, batch_size=4, learning_rate=1e-3, epochs=7),
        Job(rank=8, batch_size=8, learning_rate=3e-3, epochs=10, weight_decay=0.1),
        Job(rank=2, batch_size=4, learning_rate=1e-3, epochs=7, dropout=0.2, scheduler="linear", seed=3),
    ]
    pack = train(base, jobs, m=4)
    for job in jobs:
        alone = train(base, [job], m=4)[job.job_id]
        assert len(alone[1]) >= 20
        assert distance(pack[job.job_id][0], alone[0]) < 1e-5
        np.testing.assert_allclose(pack[job.job_id][1], alone[1], rtol=1e-5)


def test_a_refilled_slot_equals_a_fresh_run_and_compiles_nothing(base):
    one, two, three = (
        Job(rank=8, batch_size=b, learning_rate=r) for b, r in ((4, 1e-2), (8, 3e-3), (4, 1e-3))
    )
    spec = packed.pack_spec(base.config, [one, two, three], slots=2)
    shapes = choose_shapes([(ROWS, 0)], 4, limit=1)
    list(train_pack(base, spec, [[Work(one, ROWS)], [Work(two, ROWS)]], 4, shapes))  # warm
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    jobs, queues = [one, two, three], [[Work(one, ROWS), Work(three, ROWS)], [Work(two, ROWS)]]
    jnp.arange(12345)  # the counter does count
    assert len(compiled) == 1
    queued = train(base, jobs, 4, slots=2, queues=queues)
    assert len(compiled) == 1
    fresh = train(base, jobs, 4, slots=2, queues=[[Work(three, ROWS)], [Work(two, ROWS)]])
    for a, b in zip(queued[three.job_id][0], fresh[three.job_id][0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert queued[three.job_id][1] == fresh[three.job_id][1]


def test_an_inactive_slot_changes_nothing(base):
    job = Job(rank=4, batch_size=1, learning_rate=0.1)
    state = packed.init_pack(base, [job, job], total_steps=[5, 5])
    before = jax.device_get(state)
    loader = PackLoader([Slot.of(job, ROWS)] * 2, 1, choose_shapes([(ROWS, 0)], 1, limit=1))
    batch = next(loader)
    loader.close()
    batch = batch._replace(active=np.array([True, False]))
    after, metrics = packed.make_train_step(base, packed.pack_spec(base.config, [job, job]))(
        state, base.params, Batch(*batch)
    )
    assert metrics.closed.tolist() == [True, False] and after.step.tolist() == [1, 0]
    for name, factors in after.weights.items():
        np.testing.assert_array_equal(factors.b[:, 1], before.weights[name].b[:, 1])
        assert np.abs(factors.b[:, 0]).max() > 0


def run(base, jobs, spec, m, micro_steps=1, calls=6):
    """Run `calls` micro-steps, `micro_steps` to a dispatch; return the state and each micro-step's metrics."""
    state = packed.init_pack(base, jobs, total_steps=[20] * len(jobs), spec=spec)
    step = packed.make_train_step(base, spec, micro_steps=micro_steps)
    loader = PackLoader([Slot.of(job, ROWS) for job in jobs], m, choose_shapes([(ROWS, 0)], m, limit=1))
    metrics = []
    for _ in range(calls // micro_steps):
        batches = [next(loader) for _ in range(micro_steps)]
        batch = batches[0] if micro_steps == 1 else jax.tree.map(lambda *b: np.stack(b), *batches)
        state, said = step(state, base.params, batch)
        said = jax.device_get(said)
        metrics += (
            [said]
            if micro_steps == 1
            else [jax.tree.map(lambda leaf, k=k: leaf[k], said) for k in range(micro_steps)]
        )
    loader.close()
    return jax.device_get(state), metrics


def test_without_accumulation_nothing_is_kept_between_micro_steps_and_the_numbers_stay(base):
    jobs = [
        Job(rank=4, batch_size=2, learning_rate=1e-2, epochs=4),
        Job(rank=8, batch_size=2, learning_rate=3e-3, epochs=4, weight_decay=0.1, max_grad_norm=0.1, seed=1),
    ]
    summed = packed.pack_spec(base.config, jobs)
    direct = packed.pack_spec(base.config, jobs, m=2)
    assert summed.accumulate and not direct.accumulate
    assert packed.pack_spec(base.config, [*jobs, Job(batch_size=4)], m=2).accumulate
    (one, first), (two, second) = run(base, jobs, summed, 2), run(base, jobs, direct, 2)
    assert two.grads == {} and len(jax.tree.leaves(one.grads)) == len(jax.tree.leaves(one.weights))
    assert distance(jax.tree.leaves(two.weights), jax.tree.leaves(one.weights)) < 1e-6
    for a, b in zip(first, second, strict=True):
        assert a.closed.all() and b.closed.all() and (a.step == b.step).all() and (a.tokens == b.tokens).all()
        np.testing.assert_allclose(b.loss, a.loss, rtol=1e-6)
        np.testing.assert_allclose(b.grad_norm, a.grad_norm, rtol=1e-5)
        np.testing.assert_allclose(b.learning_rate, a.learning_rate)
    batch = next(PackLoader([Slot.of(jobs[0], ROWS)] * 2, 2, choose_shapes([(ROWS, 0)], 2, limit=1)))
    state = packed.init_pack(base, jobs, total_steps=[20, 20], spec=direct)
    before = jax.device_get(state)
    idle = batch._replace(active=np.array([False, True]))
    after, _ = packed.make_train_step(base, direct)(state, base.params, idle)
    assert after.step.tolist() == [0, 1]
    for old, new in zip(jax.tree.leaves(before.weights), jax.tree.leaves(after.weights), strict=True):
        np.testing.assert_array_equal(new[:, 0], old[:, 0])


def test_gradients_in_bfloat16_are_summed_in_float32(base):
    """Three equal micro-steps of an open batch: g + g + g in float32, which bfloat16 has no room for."""
    job = Job(rank=4, batch_size=8)
    spec, runtime = packed.pack_spec(base.config, [job]), Runtime(dtype=jnp.bfloat16)
    state, step = (
        packed.init_pack(base, [job], total_steps=[5], spec=spec),
        packed.make_train_step(base, spec, runtime),
    )
    loader = PackLoader([Slot.of(job, ROWS)], 2, choose_shapes([(ROWS, 0)], 2, limit=1))
    batch = next(loader)
    loader.close()
    sums = []
    for _ in range(3):
        state, metrics = step(state, base.params, batch)
        assert not metrics.closed.any()
        sums.append(jax.device_get(jax.tree.leaves(state.grads)))
    rounds = False
    for one, _, three in zip(*sums, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, one.astype(jnp.bfloat16).astype(np.float32))  # as it came
        np.testing.assert_array_equal(three, (one + one) + one)
        rounds |= bool((three != three.astype(jnp.bfloat16).astype(np.float32)).any())
    assert rounds


def test_several_micro_steps_in_one_dispatch_are_the_same_bits(tmp_path):
    with_newer_emitters(
        "from pathlib import Path",
        "from tests.test_step import random_base, together_as_singly",
        f"base = random_base(Path({str(tmp_path)!r}))",
        "together_as_singly(base, 2)",
        "together_as_singly(base, 4)",
    )


def together_as_singly(base, m):
    jobs = [
        Job(rank=4, batch_size=4, learning_rate=1e-2, epochs=2),
        Job(rank=8, batch_size=4, learning_rate=3e-3, epochs=2),
    ]
    spec = packed.pack_spec(base.config, jobs, m=m)
    assert spec.accumulate == (m == 2)
    one, singly = run(base, jobs, spec, m)
    three, together = run(base, jobs, spec, m, micro_steps=3)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(three), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(singly, together, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_dropout_depends_on_the_token_alone():
    dropout = Dropout(jnp.int32(7), jnp.float32(0.25), jnp.int32(2))
    rows, positions = jnp.array([[3, 3, 5]]), jnp.array([[0, 1, 0]])
    mask = dropout_mask(dropout, 1, 2, rows, positions, 4096)
    moved = dropout_mask(dropout, 1, 2, jnp.array([[9], [5], [3]]), jnp.array([[0], [0], [1]]), 4096)
    np.testing.assert_array_equal(mask[0, 2], moved[1, 0])
    np.testing.assert_array_equal(mask[0, 1], moved[2, 0])
    assert set(np.unique(mask)) == {0.0, np.float32(1 / 0.75)}
    assert abs(float((mask == 0).mean()) - 0.25) < 0.02
    for other in ((0, 2), (1, 3)):
        assert (dropout_mask(dropout, *other, rows, positions, 4096) != mask).any()
    changed = dropout._replace(epoch=jnp.int32(3)), dropout._replace(seed=jnp.int32(8))
    assert all((dropout_mask(d, 1, 2, rows, positions, 4096) != mask).any() for d in changed)
    none = dropout_mask(dropout._replace(rate=jnp.float32(0)), 1, 2, rows, positions, 4096)
    np.testing.assert_array_equal(none, np.ones_like(none))
