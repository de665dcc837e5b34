"""Packed greedy generation against transformers' own, and against each adapter alone."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.adapters import Factors, pad_adapter, stack_adapters
from plora_jax.evaluation.generate import _batches, _program, generate
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import load_base
from tests.models import tiny

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "generate.json").read_text())
GAIN = 4.0  # as scripts/goldens/generate.py has it
RUNTIME = Runtime(segments=False)
FAST = ("llama", "qwen2-tied", "gemma2", "phi3-longrope-long")


def louder(weights):
    """Return tiny.weights with the gain that the golden's models have."""
    ends = ("o_proj.weight", "down_proj.weight")
    return lambda config: {k: w * (GAIN if k.endswith(ends) else 1.0) for k, w in weights(config).items()}


def model(golden, directory, monkeypatch):
    """Return a golden's base model, and its adapters at rank 8 with their scales; the first adapter is none."""
    monkeypatch.setattr(tiny, "weights", louder(tiny.weights))
    config = tiny.write(directory, golden["config"])
    sites = [site.name for site in config.sites]
    padded, scales = [pad_adapter(config, {}, 8, sites)], [0.0]
    for i, one in enumerate(golden["adapters"]):
        made = tiny.adapters(config, one["rank"], 1.0, name=f"{i}.")
        factors = {name: Factors(lora.a, lora.b) for name, lora in made.items()}
        padded.append(pad_adapter(config, factors, 8, sites))
        scales.append(one["alpha"] / one["rank"])
    rows = jnp.asarray(np.tile(np.float32(scales), (config.n_layers, 1)))
    return load_base(str(directory), precision="fp32"), padded, dict.fromkeys(sites, rows)


def answers(base, adapters, scales, golden, **options):
    """Generate for a golden's prompts and return plain lists."""
    prompts = [np.array(prompt) for prompt in golden["prompts"]]
    options = {"stops": {golden["eos"]}, "new_tokens": golden["new"], "runtime": RUNTIME} | options
    made = generate(base, stack_adapters(adapters), scales, prompts, **options)
    return [[row.tolist() for row in own] for own in made]


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in GOLDEN]
)
def test_tokens_are_those_of_transformers(name, tmp_path, monkeypatch):
    golden = GOLDEN[name]
    ended = [row[-1] == golden["eos"] and len(row) < golden["new"] for own in golden["tokens"] for row in own]
    assert 0.2 < np.mean(ended) < 0.8 and len({str(own) for own in golden["tokens"]}) == 4
    assert answers(*model(golden, tmp_path, monkeypatch), golden) == golden["tokens"]


def test_an_adapter_alone_and_rows_in_small_batches_give_the_same_tokens(tmp_path, monkeypatch):
    golden = GOLDEN["llama"]
    base, adapters, scales = model(golden, tmp_path, monkeypatch)
    program, run = _program(base.graphdef, RUNTIME, golden["new"]), []
    before = program._cache_size()
    for j, adapter in enumerate(adapters):
        own = {name: scale[:, j : j + 1] for name, scale in scales.items()}
        # two of the six rows at a time: (P + new) · 2
        made = answers(base, [adapter], own, golden, at_once=2 * (24 + 24), advance=run.append)
        assert made == golden["tokens"][j : j + 1]
    assert program._cache_size() - before == 1  # of J = 1 and two rows: nothing is compiled twice
    new = sum(len(row) for own in golden["tokens"] for row in own)
    assert len(run) == 4 * 3 and sum(run) == new + 4 * sum(map(len, golden["prompts"]))


def test_batches_hold_every_row_once_and_one_size_a_bucket():
    lengths = np.random.default_rng(0).integers(1, 100, 700)
    rows = np.arange(700)[::2]
    seen, sizes = [], {}
    for part, count, P in _batches(rows, lengths, 30, 2000):
        assert lengths[part].max() <= P and len(part) * (P + 30) <= 2000
        seen += part[:count].tolist()
        sizes.setdefault(P, set()).add(len(part))
    assert sorted(seen) == rows.tolist() and 1 < len(sizes) <= 4 and all(len(s) == 1 for s in sizes.values())
    # where not even one sequence of each adapter fits, one runs
    assert [len(part) for part, _, _ in _batches(rows[:3], lengths, 30, 1)] == [1, 1, 1]


def test_a_prompt_without_tokens_is_refused(tmp_path, monkeypatch):
    base, adapters, scales = model(GOLDEN["llama"], tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="no token"):
        generate(
            base, stack_adapters(adapters), scales, [np.zeros(0)], stops=(), new_tokens=2, runtime=RUNTIME
        )
