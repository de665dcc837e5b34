"""Tokens and labels: which tokens are trained, one BOS, EOS always, lengths, and what is counted."""

import numpy as np
import pytest

from plora_jax.data.encode import Coder, read_examples
from plora_jax.data.layout import Slot
from plora_jax.data.template import Span
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from tests.data.conftest import CHATML, make_tokenizer, text_of
from tests.data.test_template import GEMMA, LLAMA2, OPEN

TALK = [("user", "hello"), ("assistant", " yes  no"), ("user", "yes"), ("assistant", "good\n")]
CHAT = {"messages": [{"role": r, "content": c} for r, c in TALK]}


def pair(prompt="Answer:", completion=" yes"):
    return {"prompt": prompt, "completion": completion}


def read(write, tokenizer, *rows, max_length=200, **how):
    return read_examples(write(rows), tokenizer, max_length=max_length, **how)


def runs(tokenizer, examples, i=0) -> list[str]:
    """Return the text of each unbroken run of labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], examples.trained[i].astype(int), [0]])))
    return [text_of(tokenizer, examples.tokens[i][a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("template", "labels"),
    [
        (CHATML, [" yes  no<|im_end|>", "good\n<|im_end|>"]),
        (GEMMA, ["yes  no<|im_end|>", "good<|im_end|>"]),
        (LLAMA2, ["  yes  no </s>", " good\n </s>"]),  # byte-level tokens hold the space before the content
        (OPEN, [" yes  no", "good\n<|im_end|>"]),
        (None, [" yes  no<|im_end|>", "good\n<|im_end|>"]),
    ],
)
def test_labels_are_on_every_assistant_turn_and_its_end_and_on_nothing_else(
    write, template, labels, trim_offsets
):
    tokenizer = make_tokenizer(template, bos="<s>", trim_offsets=trim_offsets)
    found = runs(tokenizer, read(write, tokenizer, CHAT))
    assert [f.strip(" ") for f in found] == [x.strip(" ") for x in labels]
    assert all(f.endswith(x[-1:]) for f, x in zip(found, labels, strict=True))


def test_the_text_is_the_rendered_template_with_no_second_bos(write):
    tokenizer = make_tokenizer(GEMMA, bos="<s>", adds_bos=True)
    examples = read(write, tokenizer, CHAT)
    assert (examples.tokens[0] == tokenizer.bos_token_id).sum() == 1 and examples.tokens[0][
        0
    ] == tokenizer.bos_token_id
    assert text_of(tokenizer, examples.tokens[0]).startswith("<s><|im_start|>user\nhello<|im_end|>\n")


@pytest.mark.parametrize("row", [pair(), pair("<s>Answer:"), {"text": "Answer: yes"}])
def test_one_bos_where_the_tokenizer_adds_one(write, row):
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    examples = read(write, tokenizer, row)
    assert text_of(tokenizer, examples.tokens[0]) == "<s>Answer: yes<|im_end|>"
    assert not examples.trained[0][0]


def test_no_bos_where_the_tokenizer_adds_none(write):
    tokenizer = make_tokenizer(bos="<s>")
    assert text_of(tokenizer, read(write, tokenizer, pair()).tokens[0]) == "Answer: yes<|im_end|>"


def test_prompt_and_completion_are_tokenised_together_without_the_template(write, chatml):
    examples = read(write, chatml, pair())
    together = chatml("Answer: yes", add_special_tokens=False).input_ids
    assert examples.tokens[0].tolist() == [*together, chatml.eos_token_id]
    assert runs(chatml, examples) == [" yes<|im_end|>"]


def test_a_token_across_the_border_is_a_label(write, chatml):
    # " yes" is one token of this tokenizer; the border cuts it in two
    examples = read(write, chatml, pair("Answer: y", "es no"))
    assert runs(chatml, examples) == [" yes no<|im_end|>"]


def test_eos_is_trained_once_and_pad_equal_to_eos_changes_nothing(write):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    examples = read(
        write, tokenizer, pair(), pair(completion=" yes<|im_end|>"), CHAT, {"text": "hello world"}
    )
    for i in range(4):
        assert examples.tokens[i][-1 if i != 2 else -2] == tokenizer.eos_token_id
        assert examples.trained[i][examples.tokens[i] == tokenizer.eos_token_id][-1]
    assert [(t == tokenizer.eos_token_id).sum() for t in examples.tokens] == [1, 1, 4, 1]


def test_without_an_eos_token_none_is_made_up(write):
    tokenizer = make_tokenizer(eos=None)
    examples = read(write, tokenizer, pair())
    assert runs(tokenizer, examples) == [" yes"] and "has no EOS token" in str(examples.report)


def test_multibyte_characters_and_whitespace_tokens_are_labels_too(write):
    for trim in (False, True):
        tokenizer = make_tokenizer(trim_offsets=trim)
        examples = read(write, tokenizer, pair("a:", "\n    é漢🙂\n\n x  "))
        assert runs(tokenizer, examples) == ["\n    é漢🙂\n\n x  <|im_end|>"]


def test_empty_prompts_train_all_but_the_first_token(write, chatml):
    examples = read(write, chatml, pair("", "yes no"))
    assert examples.trained[0].tolist() == [False] + [True] * (len(examples.tokens[0]) - 1)
    with_bos = make_tokenizer(bos="<s>", adds_bos=True)
    assert runs(with_bos, read(write, with_bos, pair("", "yes no"))) == ["yes no<|im_end|>"]


def test_text_trains_everything_but_the_first_token(write, chatml):
    examples = read(write, chatml, {"text": "hello world"})
    assert examples.counts[0] == examples.lengths[0] - 1


def test_rows_without_anything_to_train_are_dropped_and_counted(write, chatml):
    blank = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n"}]}
    examples = read(write, chatml, pair(completion=""), pair(), pair(completion=" \n"), {"text": ""}, blank)
    report = examples.report
    assert (len(examples), report.untrained, report.rows) == (1, 4, 5)
    assert "1 of 5 rows" in str(report) and "4 dropped, nothing to train on" in str(report)


def test_long_rows_are_truncated_dropped_or_refused_and_counted(write, chatml):
    rows = [pair(), pair("x" * 50, " yes"), pair("Answer:", " yes" * 30)]
    whole = read(write, chatml, *rows)
    assert whole.lengths.max() == whole.report.longest > 20 and whole.report.truncated == 0
    cut = read(write, chatml, *rows, max_length=20)
    # the second row loses its whole completion, so nothing of it is left to train on
    assert (len(cut), cut.report.truncated, cut.report.untrained) == (2, 1, 1)
    assert (
        cut.tokens[1].tolist() == whole.tokens[2][:20].tolist() and cut.tokens[1][-1] != chatml.eos_token_id
    )
    assert "1 truncated to 20; 1 dropped, nothing to train on" in str(cut.report)
    dropped = read(write, chatml, *rows, max_length=20, on_long="drop")
    assert (len(dropped), dropped.report.too_long) == (1, 2) and "2 dropped, longer than 20" in str(
        dropped.report
    )
    with pytest.raises(
        UserError, match=r"line 2: has \d+ tokens, more than data.max_length 20 \(data.on_long"
    ):
        read(write, chatml, *rows, max_length=20, on_long="error")
    exact = int(whole.lengths[0])
    assert read(write, chatml, pair(), max_length=exact, on_long="error").lengths.tolist() == [exact]


def test_nothing_left_is_an_error_that_says_where_the_rows_went(write, chatml):
    with pytest.raises(
        UserError, match=r"no row is left to train on \(1 read\).*1 dropped, nothing to train on"
    ):
        read(write, chatml, pair(completion=""))
    with pytest.raises(UserError, match=r"no row is left to train on \(0 read\)"):
        path = write([], "e.json")
        path.write_text("[]")
        read_examples(path, chatml, max_length=9)


def test_token_ids_outside_the_embedding_table_are_an_error(write, chatml):
    highest = int(read(write, chatml, pair()).tokens[0].max())
    assert len(read(write, chatml, pair(), vocab_size=highest + 1)) == 1
    with pytest.raises(
        UserError, match=rf"line 1: token id {highest} .* outside the model's {highest} embeddings"
    ):
        read(write, chatml, pair(), vocab_size=highest)


def test_bad_rows_stop_or_are_skipped_and_counted(write, chatml):
    bad = [{"prompt": 1, "completion": "x"}, {"messages": [{"role": "user", "content": "q"}]}]
    with pytest.raises(UserError, match=r"train\.jsonl, line 2: field 'prompt' holds the number 1"):
        read(write, chatml, pair(), *bad)
    skipped = read(write, chatml, pair(), *bad, on_bad_row="skip")
    assert (len(skipped), skipped.report.unreadable) == (1, 2)
    assert "2 skipped, unreadable (first: " in str(skipped.report) and "line 2" in str(skipped.report)


def test_mixed_formats_are_read_row_by_row_and_shown(write, chatml):
    examples = read(write, chatml, CHAT, pair(), {"instruction": "a", "output": "b"})
    assert examples.report.formats == {"chat": 1, "prompt-completion": 1, "alpaca": 1}
    assert "1 chat + 1 prompt-completion + 1 alpaca, 3 of 3 rows" in str(examples.report)
    with pytest.raises(UserError, match="field 'messages' of format chat is missing"):
        read(write, chatml, CHAT, pair(), format="chat")
    with pytest.raises(UserError, match=r"data.format is 'sharegtp'; allowed: auto, chat, sharegpt"):
        read(write, chatml, CHAT, format="sharegtp")


def test_the_report_is_one_line_with_the_counts(write, chatml):
    examples = read(write, chatml, pair(), CHAT)
    total, trained = sum(map(len, examples.tokens)), sum(int(t.sum()) for t in examples.trained)
    assert f"2 of 2 rows, {total} tokens ({trained} trained)" in str(examples.report)
    assert "\n" not in str(examples.report)


def test_notes_say_which_template_was_used_when_it_is_not_the_plain_case(write):
    system = {"messages": [{"role": "system", "content": "s"}, *CHAT["messages"]]}
    assert "has no chat template" in str(read(write, make_tokenizer(None), CHAT).report)
    assert "has no system role" in str(read(write, make_tokenizer(GEMMA, bos="<s>"), system).report)
    assert str(read(write, make_tokenizer(), system).report).endswith("of at most 200")


def test_sources_say_what_to_ask_and_what_to_expect(write, chatml):
    examples = read(write, chatml, pair(), CHAT)
    assert (examples.sources[0].prompt, examples.sources[0].completion) == ("Answer:", " yes")
    assert (
        examples.sources[1].prompt.endswith("<|im_start|>assistant\n")
        and examples.sources[1].completion == "good\n"
    )


def test_offsets_reach_back_over_what_the_tokenizer_trims():
    tokenizer = make_tokenizer(trim_offsets=True)
    coder = Coder(tokenizer)
    text = "a \n  b"
    encoded = coder.encode([text], [False], [""])[0]
    assert encoded.end[-1] == len(text) and (encoded.start[1:] <= encoded.end[:-1]).all()
    assert coder.labels(encoded, [Span(1, len(text), len(text))]).tolist() == [False] + [True] * (
        len(encoded.ids) - 1
    )


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(UserError, match="no character offsets"):
        Coder(object())


def test_optimizer_steps_come_from_the_rows_that_are_left(write, chatml):
    examples = read(write, chatml, *[pair()] * 9, *[pair(completion="")] * 8)
    assert Slot.of(Job(batch_size=4, epochs=2), examples).steps == 6  # 9 rows: 3 a pass; all 17 would be 5
