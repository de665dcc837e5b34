"""Tokenizers that write spaces as ▁ and put one in front of every piece of text (Llama 2, Gemma, Mistral)."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from plora_jax.data.choices import make_choices
from plora_jax.data.encode import read_examples
from tests.data.conftest import CORPUS
from tests.data.test_template import LLAMA2

TALK = [("user", "hello"), ("assistant", "yes no"), ("user", "yes"), ("assistant", " good film")]
ROWS = [
    {"messages": [{"role": r, "content": c} for r, c in TALK]},
    {"prompt": "the film is", "completion": " good"},
    {"prompt": "the film is ", "completion": "good"},
]


def make(kind):
    special = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    texts = CORPUS * 3
    if kind == "normalizer":  # as in Llama 2's tokenizer.json
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    letters = list("▁abcdefghijklmnopqrstuvwxyz:/[]INST")
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False
        ),
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = LLAMA2
    return tokenizer


@pytest.mark.parametrize("kind", ["normalizer", "always", "first", "never"])
def test_words_with_their_leading_space_and_the_end_mark_are_labels(write, kind):
    tokenizer = make(kind)
    examples = read_examples(write(ROWS), tokenizer, max_length=100)
    named = [tokenizer.convert_ids_to_tokens(t.tolist()) for t in examples.tokens]
    labels = [
        [n for n, k in zip(names, mask, strict=True) if k]
        for names, mask in zip(named, examples.trained, strict=True)
    ]
    joined = ["".join(x) for x in labels]
    assert joined[0] in ("▁yes▁no▁</s>▁good▁film▁</s>", "▁yes▁no▁</s>▁▁good▁film▁</s>")
    assert joined[1:] == [
        "▁good</s>",
        "▁good</s>",
    ]  # "is " + "good" is cut before the space by such a tokenizer
    assert [n.count("<s>") for n in named] == [2, 1, 1]  # Llama 2's template writes one for each exchange


def test_options_are_scored_from_their_leading_space(write):
    tokenizer = make("always")
    examples = read_examples(write(ROWS[1:2]), tokenizer, max_length=100)
    choices = make_choices(examples, tokenizer, choices=["good", "yes"])
    assert tokenizer.convert_ids_to_tokens(choices.target.tolist()) == ["▁good", "▁yes"]
    (shared,) = choices.sequences
    assert tokenizer.convert_ids_to_tokens(shared.tolist()) == ["<s>", "▁the", "▁film", "▁is"]
