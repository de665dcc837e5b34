"""A job that waits between two packs: what goes on from its state equals what was never moved."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax import adapters as lora
from plora_jax.data.encode import read_examples
from plora_jax.data.examples import Examples
from plora_jax.data.shapes import choose_shapes
from plora_jax.engine.checkpoint import Checkpoints
from plora_jax.jobs import Job
from plora_jax.models.decoder import Runtime
from plora_jax.models.find import load_tokenizer
from plora_jax.models.load import Base, load_base
from plora_jax.training.step import PackSpec, pack_spec
from plora_jax.training.trainer import Trainer, Waiting, Work, waiting_like
from tests import tiny

ROWS = [
    {"prompt": f"what is {a} ?", "completion": f" {b}"}
    for a in ("one", "two", "three", "red one", "blue two green")
    for b in ("red", "green", "blue")
]
SETTINGS: list[dict[str, Any]] = [
    {"dropout": 0.2, "scheduler": "cosine", "weight_decay": 0.1, "targets": ("q_proj", "down_proj")},
    {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, "warmup_steps": 3},
    {"rank_pattern": (("down_proj", 6),), "max_grad_norm": 0.1},
    {"optimizer": "adamw_bf16", "learning_rate": 0.05},
]
OTHER = Job(rank=4, batch_size=4, seed=9, data_seed=5, epochs=9, dropout=0.1)


def jobs() -> list[Job]:
    return [
        Job(**{"rank": 3, "batch_size": 4, "learning_rate": 0.02, "seed": 1, "epochs": 4} | more)
        for more in SETTINGS
    ]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Base, Examples]:
    """Give a tiny model, and rows of unlike lengths: 4 optimizer steps a pass, the last of them of three rows."""
    root = tmp_path_factory.mktemp("pause")
    tiny.write_model(root / "model")
    tiny.write_weights(root / "model")
    rows = tiny.write_rows(root / "train.jsonl", ROWS)
    tokenizer = load_tokenizer(str(root / "model"))
    return load_base(str(root / "model")), read_examples(str(rows), tokenizer, max_length=32, vocab_size=64)


class Ran:
    """Hold a trainer and what it logged of each job's steps, as it came."""

    def __init__(self, base: Base, examples: Examples, spec: PackSpec, m: int, **runtime: Any) -> None:
        self.lines: dict[str, list[dict[str, Any]]] = {}
        shapes = choose_shapes([(examples, 0)], m, group=m, fill=False, limit=1)
        self.trainer = Trainer(
            base, spec, m, shapes, runtime=Runtime(**runtime),
            on_step=lambda job, line: self.lines.setdefault(job.job_id, []).append(line),
        )  # fmt: skip

    def to(self, j: int, step: int) -> None:
        while self.trainer.step_of(j) < step:
            self.trainer.advance()
        self.trainer.sync()


def whole(base: Base, examples: Examples, job: Job, spec: PackSpec, m: int = 2, **runtime: Any) -> Ran:
    ran = Ran(base, examples, spec, m, **runtime)
    ran.trainer.put(0, Work(job, examples))
    ran.trainer.put(1, Work(OTHER, examples))
    ran.to(0, 16)
    return ran


def through_the_disk(waiting: Waiting, base: Base, job: Job, folder: Path) -> Waiting:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, waiting.arrays, waiting.meta)
    found = checkpoints.restore(waiting_like(base, job))
    checkpoints.close()
    assert found
    return Waiting(*found[1:])


def moved(
    base: Base, examples: Examples, job: Job, folder: Path, first: tuple[PackSpec, int], then: tuple[PackSpec, int],
    slot: int, at: int = 6, **runtime: Any,
) -> tuple[list[dict[str, Any]], lora.Adapter]:  # fmt: skip
    """Train a job to step `at` in one pack and from there in another; its lines, and its adapter at the end."""
    one = Ran(base, examples, *first, **runtime)
    one.trainer.put(0, Work(job, examples))
    one.trainer.put(1, Work(OTHER, examples))
    one.to(0, at)
    waiting = through_the_disk(one.trainer.pause(0), base, job, folder)
    two = Ran(base, examples, *then, **runtime)
    neighbour = 1 - slot if then[0].slots > 1 else None
    if neighbour is not None:
        two.trainer.put(neighbour, Work(OTHER, examples))
        two.to(neighbour, 3)  # which is elsewhere in its data
    two.trainer.put(slot, Work(job, examples), waiting)
    two.to(slot, 16)
    return one.lines[job.job_id] + two.lines[job.job_id], two.trainer.take(slot).adapter


@pytest.mark.parametrize("job", jobs(), ids=["adamw", "sgd", "pattern", "adamw_bf16"])
def test_a_moved_job_goes_on_bit_for_bit_where_the_program_is_the_same(
    task: tuple[Base, Examples], tmp_path: Path, job: Job
) -> None:
    base, examples = task
    spec = pack_spec(base.config, [job, OTHER])
    want = whole(base, examples, job, spec)
    lines, adapter = moved(base, examples, job, tmp_path, (spec, 2), (spec, 2), slot=1)
    assert lines == want.lines[job.job_id] and len(lines) == 16
    jax.tree.map(np.testing.assert_array_equal, adapter, want.trainer.take(0).adapter)


@pytest.mark.parametrize("job", jobs(), ids=["adamw", "sgd", "pattern", "adamw_bf16"])
def test_a_moved_job_equals_an_unmoved_one_under_another_program(tmp_path: Path, job: Job) -> None:
    """Other m, J, rank bucket and sites, in float64: only rounding may differ (corrections: 1e-10)."""
    with jax.enable_x64(True):
        tiny.write_model(tmp_path / "model")
        tiny.write_weights(tmp_path / "model")
        rows = tiny.write_rows(tmp_path / "train.jsonl", ROWS)
        tokenizer = load_tokenizer(str(tmp_path / "model"))
        base = load_base(str(tmp_path / "model"), dtype=np.float64)
        examples = read_examples(str(rows), tokenizer, max_length=32, vocab_size=64)
        runtime = {"dtype": jnp.float64, "precision": "highest"}
        small, other = pack_spec(base.config, [job, OTHER]), Job(rank=20, dropout=0.1)
        large = pack_spec(base.config, [job, OTHER, other, other])
        want = whole(base, examples, job, small, **runtime).trainer.take(0).adapter
        lines, adapter = moved(base, examples, job, tmp_path / "w", (small, 2), (large, 1), 0, **runtime)
        assert large.rank > small.rank and len(lines) == 16
        for got, exact in zip(jax.tree.leaves(adapter), jax.tree.leaves(want), strict=True):
            assert np.linalg.norm(got - exact) <= 1e-10 * np.linalg.norm(exact)
            assert got.dtype == np.float64 and np.linalg.norm(exact) > 0
