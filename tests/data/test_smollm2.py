"""The real SmolLM2 tokenizer and its own template (98 MB, downloaded once)."""

import pytest

from plora_jax.data.choices import make_choices
from plora_jax.data.encode import read_examples
from plora_jax.models.find import load_tokenizer
from plora_jax.quickstart import fetch_model
from tests.data.conftest import text_of
from tests.data.test_encode import runs

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(fetch_model()))


def test_a_conversation_is_the_template_and_every_answer_is_trained(write, tokenizer):
    talk = [
        ("user", "What is 12+30?"),
        ("assistant", "12+30 = 42"),
        ("user", "Sure?"),
        ("assistant", "Yes.\n#### 42"),
    ]
    rows = [{"messages": [{"role": r, "content": c} for r, c in talk]}]
    examples = read_examples(write(rows), tokenizer, max_length=200, vocab_size=49_152)
    said = "".join(f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in talk)
    assert text_of(tokenizer, examples.tokens[0]) == SYSTEM + said
    assert runs(tokenizer, examples) == ["12+30 = 42<|im_end|>", "Yes.\n#### 42<|im_end|>"]
    # digits are tokens of their own: 1 2 + 3 0 ␣= ␣ 4 2 <|im_end|>
    assert examples.trained[0].sum() == 10 + len(tokenizer("Yes.\n#### 42").input_ids) + 1


def test_a_classification_row_has_two_labels_and_one_sequence_for_its_options(write, tokenizer):
    rows = [{"prompt": "Review: fine\nSentiment:", "completion": c} for c in (" positive", " negative")]
    examples = read_examples(write(rows), tokenizer, max_length=47, vocab_size=49_152)
    assert runs(tokenizer, examples) == [" positive<|im_end|>"] and examples.counts.tolist() == [2, 2]
    assert examples.tokens[0][0] != tokenizer.bos_token_id  # this tokenizer adds none
    choices = make_choices(examples, tokenizer, choices=["positive", "negative"])
    assert [text_of(tokenizer, s) for s in choices.sequences] == ["Review: fine\nSentiment:"] * 2
    assert len(choices.row) == 4 and choices.correct.tolist() == [0, 1]
