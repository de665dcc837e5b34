"""Options of a row: where they come from, which sequences they share, which tokens are scored."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from plora_jax.data.choices import accuracy, distinct_completions, make_choices, option_scores
from plora_jax.data.encode import read_examples
from plora_jax.errors import UserError
from tests.data.conftest import make_tokenizer, text_of


@pytest.fixture
def read(write, chatml):
    def run(*rows, tokenizer=chatml, name="dev.jsonl"):
        return read_examples(write(rows, name), tokenizer, max_length=200)

    return run


def row(completion=" yes", prompt="Answer:", **more):
    return {"prompt": prompt, "completion": completion, **more}


def scored(choices, tokenizer, r, o):
    """Return (text before, target text) of each scored token of an option."""
    mine = (choices.row == r) & (choices.option == o)
    places = zip(choices.sequence[mine], choices.position[mine], choices.target[mine], strict=True)
    return [
        (text_of(tokenizer, choices.sequences[s][: p + 1]), text_of(tokenizer, [t])) for s, p, t in places
    ]


def test_one_token_options_share_the_prompt(read, chatml):
    choices = make_choices(read(row(), row(" no", "Answer: is it?")), chatml, choices=[" yes", " no"])
    assert [text_of(chatml, s) for s in choices.sequences] == ["Answer:", "Answer: is it?"]
    assert scored(choices, chatml, 0, 0) == [("Answer:", " yes")]
    assert scored(choices, chatml, 0, 1) == [("Answer:", " no")]
    assert choices.correct.tolist() == [0, 1] and choices.options == [(" yes", " no")] * 2


def test_options_that_begin_alike_share_and_eos_is_not_scored(read, chatml):
    options = [" yes", " yes no", " yes no good", " no yes", " no good"]
    choices = make_choices(read(row(choices=options)), chatml)
    assert sorted(text_of(chatml, s) for s in choices.sequences) == ["Answer: no", "Answer: yes no"]
    assert scored(choices, chatml, 0, 2) == [
        ("Answer:", " yes"),
        ("Answer: yes", " no"),
        ("Answer: yes no", " good"),
    ]
    assert scored(choices, chatml, 0, 3) == [("Answer:", " no"), ("Answer: no", " yes")]
    assert chatml.eos_token_id not in choices.target


def test_the_rows_own_options_win_then_the_given_ones_then_the_training_rows(read, chatml):
    train = read(row(" good"), row(" bad"), row(" bad"), name="train.jsonl")
    one = read(row(choices=[" no", " yes"]))
    assert make_choices(one, chatml, choices=[" a", " yes"], train=train).options == [(" no", " yes")]
    two = read(row(" bad"))
    assert make_choices(two, chatml, choices=[" bad", " a"], train=train).options == [(" bad", " a")]
    assert make_choices(two, chatml, train=train).options == [(" bad", " good")]


def test_options_take_over_the_completions_spaces(read, chatml):
    assert make_choices(read(row(" yes")), chatml, choices=["no", "yes"]).options == [(" no", " yes")]
    assert make_choices(read(row("yes")), chatml, choices=[" no", " yes"]).options == [("no", "yes")]


def test_chat_rows_offer_options_for_the_last_assistant_turn(read, chatml):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    choices = make_choices(read({"messages": talk}), chatml, choices=["yes", "no"])
    before, target = scored(choices, chatml, 0, 0)[0]
    assert before.endswith("q<|im_end|>\n<|im_start|>assistant\n") and "yes".startswith(target)


def test_bos_stands_before_the_prompt_where_the_tokenizer_adds_it(read):
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    choices = make_choices(read(row(), tokenizer=tokenizer), tokenizer, choices=["yes", "no"])
    assert [text_of(tokenizer, s) for s in choices.sequences] == ["<s>Answer:"]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (
            [row()],
            None,
            "dev.jsonl, line 1: metric choice_accuracy needs 'choices' in the row, or data.choices",
        ),
        (
            [row(), row(" maybe")],
            [" yes", " no"],
            "line 2: the completion 'maybe' is none of data.choices ('yes', 'no')",
        ),
        ([row(choices=[" yes", " yes"])], None, "line 1: the same option is listed twice"),
        ([row("yes", ""), row("no", "")], ["yes", "no"], "has no token that follows another"),
    ],
)
def test_faults_name_the_row(read, chatml, rows, options, says):
    with pytest.raises(UserError) as caught:
        # a training row of two tokens keeps the file readable where the prompt is empty
        make_choices(read(*rows), make_tokenizer() if options else chatml, choices=options)
    assert says in str(caught.value)


def test_options_with_the_same_tokens_are_no_options(read):
    core = Tokenizer(models.WordLevel({"<unk>": 0, "Answer": 1, "yes": 2, "</s>": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    rows = read(row(" good"), tokenizer=words)
    with pytest.raises(UserError, match="line 1: options ' good' and ' bad' have the same tokens"):
        make_choices(rows, words, choices=[" good", " bad"])
    assert len(make_choices(rows, words, choices=[" good", " yes"]).row) == 2


def test_too_many_distinct_completions_are_no_options(read):
    many = read(*(row(f" {i}") for i in range(101)))
    with pytest.raises(UserError, match=r"101 distinct completions \(2 to 100 could serve\)"):
        distinct_completions(many)
    with pytest.raises(UserError, match="1 distinct completions"):
        distinct_completions(read(row(), row()))
    assert len(distinct_completions(read(*(row(f" {i}") for i in range(100))))) == 100


def test_scores_are_means_over_an_options_tokens(read, chatml):
    choices = make_choices(
        read(row(" no", choices=[" yes", " no good bad", " no"]), row(choices=[" no", " yes"])), chatml
    )
    logprobs = np.zeros(len(choices.row))
    logprobs[(choices.row == 0) & (choices.option == 0)] = -2.0
    logprobs[(choices.row == 0) & (choices.option == 1)] = [-1.0, -2.0, -1.5]
    logprobs[(choices.row == 0) & (choices.option == 2)] = -1.0
    logprobs[choices.row == 1] = [-0.5, -0.7]
    expected = [[-2.0, -1.5, -1.0], [-0.5, -0.7, -np.inf]]
    np.testing.assert_allclose(option_scores(choices, logprobs), expected)
    assert accuracy(choices, logprobs) == 0.5
    logprobs[choices.row == 0] = np.nan
    assert accuracy(choices, logprobs) == 0.0
    assert accuracy(choices, np.full(len(choices.row), np.nan)) == 0.0
