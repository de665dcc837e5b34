"""Tiny tokenizers made on the spot: byte-level BPE with a ChatML template, and variations of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from plora_jax.data.examples import DataReport, Examples

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the film is good yes no Answer: the answer is",
    "user assistant system\n hello world 1 2 3",
    " yes no good bad",
]


def make_tokenizer(
    template=CHATML,
    *,
    eos="<|im_end|>",
    bos=None,
    adds_bos=False,
    trim_offsets=False,
    corpus=CORPUS,
    size=330,
):
    """Train a byte-level BPE tokenizer of up to `size` tokens; `adds_bos`: it puts BOS in front by itself."""
    special = [AddedToken(t, special=True) for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    elif trim_offsets:
        core.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def make_examples(n, *, low=4, high=60, trained=None, seed=0) -> Examples:
    """Draw n rows of low … high-1 tokens, ids all unlike; the last `trained` (or some) of them are labels."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(low, high, n)
    tokens = [np.arange(k, dtype=np.int32) + 1000 * (i + 1) for i, k in enumerate(lengths)]
    labels = [int(draw.integers(1, k)) if trained is None else min(trained, k - 1) for k in lengths]
    masks = [np.arange(k) >= k - t for k, t in zip(lengths, labels, strict=True)]
    report = DataReport(
        "made up", {}, n, 0, 0, 0, 0, high, int(lengths.max()), int(lengths.sum()), sum(labels)
    )
    return Examples(tokens, masks, report)


@pytest.fixture(scope="session")
def chatml():
    """Give the ordinary case: ChatML, EOS ends each turn, no BOS."""
    return make_tokenizer()


@pytest.fixture
def write(tmp_path):
    """Write rows as a .jsonl file and return its path."""

    def run(rows, name="train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        return path

    return run


def text_of(tokenizer, ids) -> str:
    """Decode ids to the very text, special tokens shown."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
