"""Labels against transformers' own: the mask it computes for templates that mark what the assistant generates."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from plora_jax.data.encode import read_examples
from tests.data.conftest import CHATML, make_tokenizer

MARKED = (  # CHATML, with the assistant's words and end mark between generation tags
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
TOKENIZERS = [make_tokenizer(CHATML), make_tokenizer(MARKED)]
# everything JSON can carry but half surrogates; special tokens by their text are another test's matter
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
TALKS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)


def agree(tmp_path, talk, tokenizer):
    messages = [
        {"role": r, "content": c} for pair in talk for r, c in zip(("user", "assistant"), pair, strict=True)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    ours = read_examples(path, tokenizer, max_length=10_000)
    theirs = TOKENIZERS[1].apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    assert ours.tokens[0].tolist() == theirs["input_ids"]
    assert ours.trained[0].astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["plain", "marked"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talk=TALKS)
def test_labels_are_those_of_transformers_for_any_text(tmp_path, tokenizer, talk):
    assume(all(answer.strip() for _, answer in talk))
    agree(tmp_path, talk, tokenizer)


def test_the_oracle_marks_words_and_end_marks(tmp_path):
    theirs = TOKENIZERS[1].apply_chat_template(
        [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes no"}],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    mask = np.array(theirs["assistant_masks"], bool)
    assert TOKENIZERS[1].decode(np.array(theirs["input_ids"])[mask]) == "yes no<|im_end|>"
    agree(tmp_path, [("yes", "yes no"), ("is é 🙂", "\n  no\n")], TOKENIZERS[0])
