"""A job in a pack equals the same job alone: its gradients in float32, its whole training in float64."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from plora_jax import adapters as lora
from plora_jax.jobs import Job
from plora_jax.models.decoder import Runtime
from plora_jax.training.step import empty_pack, fresh_slot, make_load_slot, make_train_step, pack_spec
from tests.goldens import peft_recipe as recipe
from tests.peft_cases import Rows, base_of, micro_batch, run_pack

JOBS = [
    Job(rank=3, alpha=6.0, learning_rate=5e-3, batch_size=2, dropout=0.2, seed=1, scheduler="cosine"),
    Job(rank=16, alpha=8.0, learning_rate=2e-3, batch_size=4, weight_decay=0.1, seed=2, warmup_steps=3),
    Job(rank=9, optimizer="sgd", momentum=0.9, learning_rate=5e-2, batch_size=2, seed=3, targets=("q_proj", "up_proj")),
    Job(
        rank=5, use_rslora=True, batch_size=6, seed=4, max_grad_norm=0.1, learning_rate=3e-3, beta2=0.95,
        rank_pattern=(("down_proj", 12),), scheduler="linear",
    ),
    Job(rank=4, optimizer="adamw_bf16", learning_rate=5e-3, batch_size=2, seed=5, targets=("q_proj", "down_proj")),
]  # fmt: skip


def rows_of(job: Job) -> Rows:
    rng, out = np.random.default_rng(job.seed), []
    for _ in range(recipe.STEPS * job.batch_size):
        n = int(rng.integers(4, recipe.LENGTH + 1))
        out.append((rng.integers(3, recipe.VOCAB, n).astype(np.int32), np.arange(n) >= rng.integers(0, 4)))
    return out


def start(config: lora.ModelConfig, job: Job) -> lora.Adapter:
    """Return an adapter whose B is not zero, so that A's gradients do not vanish."""
    rng, out = np.random.default_rng(job.seed), {}
    shapes = {site.name: site for site in config.sites}
    for name, rank in lora.ranks(config, job).items():
        own = np.arange(rank.max()) < rank[:, None]  # [L, R]
        a = rng.uniform(-1, 1, (*own.shape, shapes[name].d_in)) * own[..., None] / shapes[name].d_in ** 0.5
        b = 0.1 * rng.standard_normal((len(own), shapes[name].d_out, own.shape[1])) * own[:, None]
        out[name] = lora.Factors(a.astype(np.float32), b.astype(np.float32))
    return out


def relative(ours: lora.Adapter, theirs: lora.Adapter) -> float:
    assert ours.keys() == theirs.keys()
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    gap = sum(float(np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum()) for a, b in pairs)
    return (gap / sum(float(np.square(np.asarray(b, np.float64)).sum()) for _, b in pairs)) ** 0.5


def test_gradients_of_one_step_equal_in_float32(tmp_path: Path) -> None:
    base = base_of(tmp_path, "qwen2")
    runtime = Runtime(precision="highest")

    def gradients(jobs: list[Job]) -> list[lora.Adapter]:
        spec = pack_spec(base.config, jobs)
        load, state = make_load_slot(spec), empty_pack(base.config, spec)
        for slot, job in enumerate(jobs):
            state = load(state, slot, *fresh_slot(base.config, spec, job, 10, start(base.config, job)))
        batch = micro_batch([rows_of(job)[:2] for job in jobs], [False] * len(jobs), 0)
        state, _ = make_train_step(base, spec, runtime)(state, base.params, batch)
        return [lora.unstack_adapter(base.config, job, state.grads, slot) for slot, job in enumerate(jobs)]

    packed, (alone,) = gradients(JOBS), gradients(JOBS[:1])
    assert relative(packed[0], alone) < 1e-6
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(alone))


def test_training_equals_in_float64(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        base = base_of(tmp_path, "llama", np.float64)
        runtime = Runtime(dtype=jnp.float64, precision="highest")
        starts = [start(base.config, job) for job in JOBS]
        state, records = run_pack(base, JOBS, [rows_of(job) for job in JOBS], 1, starts, runtime)
        assert np.asarray(state.step).tolist() == [recipe.STEPS] * len(JOBS)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.weights)} == {jnp.dtype(jnp.float64)}
        for slot in (0, 3, 4):
            job = JOBS[slot]
            alone, record = run_pack(base, [job], [rows_of(job)], job.batch_size, [starts[slot]], runtime)
            ours, theirs = (
                lora.unstack_adapter(base.config, job, s.weights, i) for s, i in ((state, slot), (alone, 0))
            )
            assert relative(ours, theirs) < 1e-10
            assert relative(ours, starts[slot]) > 0.01
            np.testing.assert_allclose(records[slot]["loss"], record[0]["loss"], rtol=1e-10)
            assert records[slot]["tokens"] == record[0]["tokens"]


def test_highest_precision_reaches_every_product(tmp_path: Path) -> None:
    """Forward, backward and head: on a GPU one product left at the default would round to TF32."""
    base = base_of(tmp_path, "llama")
    spec = pack_spec(base.config, JOBS)
    batch = micro_batch([rows_of(job)[:2] for job in JOBS], [True] * len(JOBS), 0)

    def products(runtime: Runtime, outside: str | None = None) -> list[str]:
        step = make_train_step(base, spec, runtime)
        with jax.default_matmul_precision(outside):
            lines = step.lower(empty_pack(base.config, spec), base.params, batch).as_text().splitlines()
        return [line for line in lines if "dot_general" in line]

    usual, highest = products(Runtime()), products(Runtime(precision="highest"))
    assert len(usual) == len(highest) > 40
    assert not any("HIGHEST" in line for line in usual)
    assert [line for line in highest if "HIGHEST" not in line] == []
    assert products(Runtime(), "highest") == highest, (
        "jax's own setting holds where the runtime asks for none"
    )
