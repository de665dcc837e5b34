"""Isolation, bitwise: nothing that happens in other slots changes a slot's numbers, under one compiled program."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plora_jax import adapters as lora
from plora_jax.jobs import Job
from plora_jax.models.load import Base
from plora_jax.training.batch import Batch
from plora_jax.training.step import (
    PackSpec,
    PackState,
    empty_pack,
    fresh_slot,
    make_load_slot,
    make_train_step,
)
from tests.goldens import peft_recipe as recipe
from tests.peft_cases import base_of

SLOTS, WIDTH, LENGTH, STEPS = 3, 2, 8, 5  # J, m, S, micro-steps
KEPT = 1  # the slot that is watched


class Neighbour(NamedTuple):
    """What happens in another slot: the job, its data, and what befalls it at micro-step `at`."""

    job: Job
    data: int
    at: int
    event: str


EVENTS = (
    "nothing",
    "nan in weights",
    "inf in weights",
    "nan in moments",
    "nan in scale",
    "leaves",
    "replaced",
    "empty",
)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> "Pack":
    return Pack(base_of(tmp_path_factory.mktemp("base"), "llama"))


class Pack:
    """One compiled program of three slots with room for everything, and runs of it."""

    def __init__(self, base: Base):
        self.base = base
        self.spec = PackSpec(
            SLOTS, 16, recipe.SITES, frozenset({"adamw", "adamw_bf16", "sgd"}), has_dropout=True
        )
        self.load = make_load_slot(self.spec)
        self.nothing = jax.device_get(empty_pack(base.config, self.spec))
        step = make_train_step(base, self.spec)
        # one executable: other shapes or settings that were not traced would be an error, not another program
        self.step = step.lower(self.empty(), base.params, self.batch(0, Job(), {})).compile()
        self.kept = cache(lambda job: self.run(job, {}))

    def run(self, job: Job, others: dict[int, Neighbour]) -> list[dict[str, np.ndarray]]:
        """Train `job` in the watched slot beside others; return all bits of the slot after each micro-step."""
        state = self.fill(self.empty(), KEPT, job)
        for slot, other in others.items():
            if other.event != "empty":
                state = self.fill(state, slot, other.job)
        seen = []
        for at in range(STEPS):
            for slot, other in others.items():
                if other.at == at:
                    state = self.befall(state, slot, other)
            state, metrics = self.step(state, self.base.params, self.batch(at, job, others))
            seen.append(
                slot_of(state, KEPT)
                | {f"metrics.{k}": np.asarray(v)[KEPT] for k, v in metrics._asdict().items()}
            )
        assert self.load._cache_size() == 1, "loading a slot compiled again"
        return seen

    def empty(self) -> PackState:
        return jax.tree.map(jnp.array, self.nothing)

    def fill(self, state: PackState, slot: int, job: Job) -> PackState:
        """Load a job whose B is not zero, so that all gradients flow from the first step."""
        return self.load(
            state, slot, *fresh_slot(self.base.config, self.spec, job, STEPS, start(self.base, job))
        )

    def befall(self, state: PackState, slot: int, other: Neighbour) -> PackState:
        if other.event == "replaced":
            return self.fill(
                state, slot, replace(other.job, seed=other.job.seed + 1, rank=3, rank_pattern=())
            )
        if "weights" in other.event:
            bad = jnp.nan if "nan" in other.event else jnp.inf
            q = state.weights["q_proj"]
            return state._replace(weights=state.weights | {"q_proj": q._replace(a=q.a.at[:, slot].set(bad))})
        if "moments" in other.event:
            adam = state.optimizer["adamw"]
            nu = jax.tree.map(lambda x: x.at[:, slot].set(jnp.nan), adam.nu)
            return state._replace(optimizer=state.optimizer | {"adamw": adam._replace(nu=nu)})
        if "scale" in other.event:
            return state._replace(scales=jax.tree.map(lambda x: x.at[:, slot].set(jnp.nan), state.scales))
        return state

    def batch(self, at: int, job: Job, others: dict[int, Neighbour]) -> Batch:
        """Return one micro-batch: the watched slot's rows depend on the micro-step alone."""
        arrays = [np.zeros((SLOTS, WIDTH, LENGTH), np.int32) for _ in range(5)]
        tokens, positions, rows, trained, targets = arrays
        positions[:], rows[:], trained[:], targets[:] = np.arange(LENGTH), -1, 0, -1
        close, active = np.zeros(SLOTS, bool), np.zeros(SLOTS, bool)
        epoch = np.zeros(SLOTS, np.int32)
        for slot in (KEPT, *others):
            other = others.get(slot)
            if other and (other.event == "empty" or (other.event == "leaves" and at >= other.at)):
                continue
            size = (other.job if other else job).batch_size
            rng = np.random.default_rng((other.data if other else 0, at))
            epoch[slot], active[slot], close[slot] = at // 2, True, (at + 1) * WIDTH % size == 0
            for i in range(WIDTH):
                n = int(rng.integers(3, LENGTH + 1))
                tokens[slot, i, :n] = rng.integers(0, recipe.VOCAB, n)
                rows[slot, i, :n] = rng.integers(0, 1000)
                trained[slot, i, : n - 1], targets[slot, i, : n - 1] = np.arange(n - 1), tokens[slot, i, 1:n]
        return Batch(tokens, positions, rows, trained, targets, epoch, close, active)


def start(base: Base, job: Job) -> lora.Adapter:
    rng, out = np.random.default_rng(job.seed), {}
    for site in base.config.sites:
        rank = lora.ranks(base.config, job).get(site.name)
        if rank is not None:
            a, b = ((len(rank), rank.max(), site.d_in), (len(rank), site.d_out, rank.max()))
            out[site.name] = lora.Factors(*(0.1 * rng.standard_normal(s).astype(np.float32) for s in (a, b)))
    return out


def slot_of(state: PackState, slot: int) -> dict[str, np.ndarray]:
    """Return every array of the state at one slot, copied; the job axis is 1 for stacks and 0 elsewhere."""
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name, value = jax.tree_util.keystr(path), np.array(leaf)
        stacked = name.startswith((".weights", ".grads", ".scales", ".optimizer")) and value.ndim > 1
        out[name] = value[:, slot] if stacked else value[slot]
    return out


def bits(value: np.ndarray) -> bytes:
    return np.asarray(value).tobytes()


JOBS = st.builds(
    Job,
    rank=st.integers(1, 16),
    alpha=st.sampled_from([1.0, 16.0, 1e4]),
    use_rslora=st.booleans(),
    learning_rate=st.sampled_from([1e-5, 1e-3, 1.0, 1e20]),
    weight_decay=st.sampled_from([0.0, 0.1, 10.0]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.5, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3]),
    momentum=st.sampled_from([0.0, 0.9]),
    max_grad_norm=st.sampled_from([0.0, 1e-3, 1.0]),
    dropout=st.sampled_from([0.0, 0.5]),
    optimizer=st.sampled_from(["adamw", "adamw_bf16", "sgd"]),
    scheduler=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_steps=st.integers(0, 2),
    batch_size=st.sampled_from([2, 4, 6]),
    targets=st.sampled_from(["all-linear", ("q_proj", "v_proj"), ("down_proj",)]),
    seed=st.integers(0, 9),
)
NEIGHBOURS = st.builds(Neighbour, JOBS, st.integers(1, 9), st.integers(0, STEPS - 1), st.sampled_from(EVENTS))
WATCHED = st.sampled_from(
    [
        Job(rank=8, learning_rate=1e-2, batch_size=4, dropout=0.3, weight_decay=0.1),
        Job(rank=5, learning_rate=1e-2, batch_size=2, optimizer="sgd", momentum=0.9, max_grad_norm=0.1),
        Job(rank=6, learning_rate=1e-2, batch_size=4, optimizer="adamw_bf16"),
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=WATCHED, first=NEIGHBOURS, last=NEIGHBOURS)
def test_neighbours_change_no_bit_of_a_slot(pack: Pack, job: Job, first: Neighbour, last: Neighbour) -> None:
    alone, beside = pack.kept(job), pack.run(job, {0: first, 2: last})
    for at, (want, got) in enumerate(zip(alone, beside, strict=True)):
        changed = [name for name in want if bits(want[name]) != bits(got[name])]
        assert not changed, f"micro-step {at}: {changed}"
    finals = [value for name, value in alone[-1].items() if name.startswith(".weights")]
    assert all(np.isfinite(value).all() for value in finals)


def test_the_watched_slot_trains_and_its_neighbours_can_break(pack: Pack) -> None:
    """What the property compares does move, and the poison does poison."""
    job = Job(rank=8, learning_rate=1e-2, batch_size=4, dropout=0.3, weight_decay=0.1)
    bad = Neighbour(Job(rank=4, learning_rate=1e20, batch_size=2), 1, 0, "nan in weights")
    seen = pack.run(job, {0: bad, 2: bad._replace(event="nothing")})
    assert [bool(s["metrics.closed"]) for s in seen] == [False, True, False, True, False]
    before, after = (s[".weights['q_proj'].a"] for s in (seen[0], seen[-1]))
    assert (before[:, :8] != after[:, :8]).all()
    assert not after[:, 8:].any(), "padded rows moved"
    assert pack.run(replace(job, seed=1), {})[-1]["metrics.loss"] != seen[-1]["metrics.loss"]


@pytest.mark.parametrize("event", ["nan in weights", "inf in weights"])
def test_a_broken_slot_skips_its_steps_and_says_so(pack: Pack, event: str) -> None:
    broken = Neighbour(Job(rank=4, batch_size=2), 1, 0, event)
    good = Job(rank=8, batch_size=2)
    state = pack.fill(pack.fill(pack.empty(), KEPT, good), 0, broken.job)
    state = pack.befall(state, 0, broken)
    before = slot_of(state, 0)
    for at in range(3):
        state, metrics = pack.step(state, pack.base.params, pack.batch(at, good, {0: broken}))
    assert np.asarray(metrics.skipped).tolist() == [3, 0, 0]
    assert np.asarray(metrics.step).tolist() == [3, 3, 0]
    after = slot_of(state, 0)
    kept = [name for name in before if name.startswith((".weights", ".optimizer"))]
    assert all(bits(before[name]) == bits(after[name]) for name in kept)


def test_a_reused_slot_equals_a_fresh_one(pack: Pack) -> None:
    """A job in a slot that another job left behind (moments, step counter, open batch) starts as if alone."""
    job = Job(rank=5, learning_rate=1e-2, batch_size=4)
    old = Neighbour(Job(rank=16, learning_rate=0.1, batch_size=6, weight_decay=0.1), 3, 0, "nothing")
    state = pack.fill(pack.empty(), KEPT, old.job)
    for at in range(4):  # leaves in the middle of its second batch
        state, _ = pack.step(state, pack.base.params, pack.batch(at, old.job, {}))
    assert slot_of(state, KEPT)[".tokens"] > 0
    state = pack.fill(state, KEPT, job)
    for at, want in enumerate(pack.run(job, {})):
        state, _ = pack.step(state, pack.base.params, pack.batch(at, job, {}))
        got = slot_of(state, KEPT)
        assert [name for name in got if bits(want[name]) != bits(got[name])] == []
