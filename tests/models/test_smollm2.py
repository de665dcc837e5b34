"""The real SmolLM2-135M against transformers' reading of the same file (scripts/goldens/perplexity.py)."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from plora_jax.models.load import load_base
from plora_jax.quickstart import fetch_model

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "models" / "smollm2.json").read_text())


@pytest.fixture(scope="module")
def base():
    return load_base(str(fetch_model()), precision="fp32")


def test_perplexity_within_a_tenth_of_a_percent(base):
    ids = jnp.asarray([GOLDEN["ids"]], jnp.int32)
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]

    @jax.jit
    def mean_loss(params):
        model = base.model(params)
        logits = model.logits(model.hidden(ids, positions, jnp.zeros_like(ids)))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1).mean()

    assert math.exp(mean_loss(base.params)) == pytest.approx(GOLDEN["perplexity"], rel=1e-3)


def test_tokenizer_splits_digits_and_round_trips(base):
    ids = base.tokenizer(GOLDEN["text"], add_special_tokens=False).input_ids
    assert ids == GOLDEN["ids"]
    assert base.tokenizer.tokenize("26") == ["2", "6"]
    assert base.tokenizer.decode(ids) == GOLDEN["text"]


def test_chat_template_and_special_tokens(base):
    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    assert base.tokenizer.apply_chat_template(messages, tokenize=False) == GOLDEN["chat"]
    assert base.tokenizer.eos_token == "<|im_end|>"
    assert base.tokenizer.convert_ids_to_tokens(base.tokenizer("<|im_end|>").input_ids) == ["<|im_end|>"]
    assert base.config.eos_ids == (base.tokenizer.eos_token_id,)
