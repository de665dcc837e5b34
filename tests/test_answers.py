"""Reading an answer out of a text, and the prompts that ask for one."""

import json

import pytest

from plora_jax.config.sweep import parse_sweep, resolved
from plora_jax.data.encode import read_examples
from plora_jax.errors import UserError
from plora_jax.evaluation.answers import Answer, chat_ends, make_answer, make_questions, parse_answer
from plora_jax.evaluation.metrics import UserMetric
from plora_jax.models.find import load_tokenizer, stop_ids
from tests import tiny

MARK = Answer("after", "####")
CASES = [
    (Answer("whole"), " The answer. \n", "The answer."),
    (Answer("whole"), " \n", None),
    (Answer("whole"), "1,234.50", "1,234.50"),  # a whole text is compared as it is written
    (Answer("last_number"), "3 + 4 = 7", "7"),
    (Answer("last_number"), "it is 1,234.50", "1234.5"),
    (Answer("last_number"), "it is 1234.5.", "1234.5"),
    (Answer("last_number"), "$1,080 in all", "1080"),
    (Answer("last_number"), "between 3-4", "4"),
    (Answer("last_number"), "it is -4", "-4"),
    (Answer("last_number"), "it is \u22124 (below zero)", "-4"),
    (Answer("last_number"), "-0.0", "0"),
    (Answer("last_number"), ".5", "0.5"),
    (Answer("last_number"), "1e3", "1000"),
    (Answer("last_number"), "1000", "1000"),
    (Answer("last_number"), "12,34", "34"),  # no thousands separator
    (Answer("last_number"), "1,2345", "2345"),
    (Answer("last_number"), "9" * 40 + "1", "9" * 40 + "1"),  # no digit is rounded away
    (Answer("last_number"), "10e400", "1E+401"),
    (Answer("last_number"), "1e999999999999", "1e999999999999"),
    (Answer("last_number"), "none at all", None),
    (MARK, "so 2 + 3 = 5\n#### 5", "5"),
    (MARK, "#### 1,080\nQ: and then?\n#### 3", "1080"),
    (MARK, "####\n\n  Paris \nis it", "Paris"),
    (MARK, "#### $5", "$5"),
    (MARK, "the answer is 5", None),
    (MARK, "the answer is ####  ", None),
    (Answer("regex", r"answer is (\w+)|\((\w)\)"), "so the answer is yes", "yes"),
    (Answer("regex", r"answer is (\w+)|\((\w)\)"), "so (B)", "B"),
    (Answer("regex", r"\d+ km"), "it is 12 km or 13 km", "12 km"),
    (Answer("regex", r"is (.*)"), "is 1,000.0", "1000"),
    (Answer("regex", r"^\w+"), " yes, it is", "yes"),
    (Answer("regex", r"(x*)"), "abc", None),
    (Answer("regex", r"y"), "abc", None),
]


@pytest.mark.parametrize(("answer", "text", "found"), CASES)
def test_extract(answer, text, found):
    assert answer.extract(text) == found


def test_the_configuration_and_the_command_line_name_the_same():
    for written, spoken, made in (
        ("last_number", "last_number", Answer("last_number")),
        ({"after": "####"}, "after:####", MARK),
        ({"regex": "a: (.)"}, "regex:a: (.)", Answer("regex", "a: (.)")),
    ):
        data = {"train": "a", "eval": "b", "metric": "exact_match", "answer": written, "max_new_tokens": 9}
        sweep = parse_sweep(json.dumps({"model": "m", "data": data}))
        assert make_answer(sweep.data.answer) == made == make_answer(parse_answer(spoken))
        assert parse_sweep(resolved(sweep)).data == sweep.data
    with pytest.raises(ValueError, match="before"):
        parse_answer("before:x")


ROWS = [
    {"prompt": "what is one ?", "completion": " red"},
    {"prompt": "what is two ? ", "completion": "blue"},  # the space belongs to the prompt
    {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "blue"},
        ]
    },
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Load the tiny model's tokenizer."""
    return load_tokenizer(str(tiny.write_model(tmp_path_factory.mktemp("tiny") / "model")))


def examples_of(tokenizer, path, rows, max_length=64):
    return read_examples(tiny.write_rows(path, rows), tokenizer, max_length=max_length)


def test_prompts_are_what_the_rows_begin_with(tokenizer, tmp_path):
    examples = examples_of(tokenizer, tmp_path / "eval.jsonl", ROWS)
    asked = make_questions(examples, tokenizer, Answer("whole"), new_tokens=5, stops=(7,))
    words = [" ".join(tokenizer.convert_ids_to_tokens(prompt)) for prompt in asked.prompts]
    assert words[:2] == ["what is one ?", "what is two ?"]
    assert words[2] == "user : one <eos> assistant : red <eos> user : two <eos> assistant :"
    for prompt, row in zip(asked.prompts, examples.tokens, strict=True):
        assert row[: len(prompt)].tolist() == prompt.tolist()
    assert asked.stops == {7, tokenizer.eos_token_id} and asked.longest == 16 + 5
    right, wrong = tokenizer.encode(" red <eos>"), tokenizer.encode("blue red")
    assert asked.texts([right, wrong, right]) == ["red", "blue red", "red"]
    assert asked.grade(["red", "blue", "red"]).tolist() == [1, 1, 0]


def test_a_token_across_the_border_is_the_answers(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE({"a": 0, ":": 1, "x": 2, "y": 3, "xy": 4, "<e>": 5}, [("x", "y")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>")
    examples = examples_of(tokenizer, tmp_path / "eval.jsonl", [{"prompt": "a:x", "completion": "y"}])
    asked = make_questions(examples, tokenizer, Answer("whole"), new_tokens=5)
    assert asked.prompts[0].tolist() == [0, 1] and asked.repeated == ["x"]
    assert asked.texts([[4, 5]]) == ["y"] and asked.grade(["y"]).tolist() == [1]


@pytest.mark.parametrize(
    ("rows", "answer", "says"),
    [
        (ROWS[:1], Answer("last_number"), "line 1: data.answer last_number finds no answer in ' red'"),
        (ROWS[:1], MARK, "line 1: data.answer after '####' finds no answer in ' red'"),
        ([ROWS[0], {"text": "one"}], Answer("whole"), "line 2: the prompt has nothing to go on from"),
        ([ROWS[2]], Answer("whole"), "line 1: the prompt has 14 tokens, more than max_length 10"),
    ],
)
def test_rows_that_cannot_be_asked(rows, answer, says, tokenizer, tmp_path):
    examples = examples_of(tokenizer, tmp_path / "eval.jsonl", rows, max_length=10)
    with pytest.raises(UserError, match=says):
        make_questions(examples, tokenizer, answer, new_tokens=5)


def test_a_users_metric_gets_texts_and_is_tried_before_anything_is_trained(tokenizer, tmp_path):
    examples, seen = examples_of(tokenizer, tmp_path / "eval.jsonl", ROWS[:2]), []

    def length(predictions, references):
        seen.append((predictions, references))
        return [len(p) / len(r) for p, r in zip(predictions, references, strict=True)]

    metric = UserMetric("m:length", length, True)
    asked = make_questions(examples, tokenizer, metric, new_tokens=5)
    assert seen == [(["red", "blue"], ["red", "blue"])] and not asked.proportion
    assert asked.grade(["green", "bl"]).tolist() == [5 / 3, 1 / 2]
    with pytest.raises(UserError, match="m:f returned 1 values for 2 rows"):
        make_questions(examples, tokenizer, UserMetric("m:f", lambda p, r: [1], True), new_tokens=5)


def test_what_ends_an_answer(tmp_path, tokenizer):
    model = tiny.write_model(tmp_path / "model", eos_token_id=[1, 5])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert stop_ids(str(model)) == (1, 5, 9) and stop_ids("no/such-model") == ()
    tokenizer = load_tokenizer(str(model))
    assert chat_ends(tokenizer) == {1}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|more|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n<|more|>{% endfor %}"
    )
    assert chat_ends(tokenizer) == {1, tokenizer.convert_tokens_to_ids("<|end|>")}
