"""Properties of tokenised rows that others rely on."""

from plora_jax.data.encode import read_examples
from plora_jax.data.examples import overlap

ROWS = [{"prompt": "Answer:", "completion": c} for c in (" yes", " no", " good film")]


def test_heads_stand_one_before_their_targets(write, chatml):
    examples = read_examples(write(ROWS), chatml, max_length=50)
    for tokens, trained, heads, targets in zip(
        examples.tokens, examples.trained, examples.heads, examples.targets, strict=True
    ):
        assert (heads >= 0).all() and targets.tolist() == tokens[trained].tolist() == tokens[
            heads + 1
        ].tolist()
    assert examples.counts.tolist() == [len(h) for h in examples.heads]


def test_the_digest_follows_the_content_and_nothing_else(write, chatml):
    def digest(rows, name="a.jsonl", max_length=50):
        return read_examples(write(rows, name), chatml, max_length=max_length).digest

    assert digest(ROWS) == digest(ROWS, "b.jsonl", 60)
    different = [digest(ROWS[:2]), digest(ROWS[::-1]), digest(ROWS, max_length=4)]
    whole_text = [{"text": r["prompt"] + r["completion"]} for r in ROWS]  # the same tokens, other labels
    assert len({digest(ROWS), digest(whole_text), *different}) == 5


def test_rows_in_both_parts_are_counted(write, chatml):
    train = read_examples(write(ROWS, "train.jsonl"), chatml, max_length=50)
    same = read_examples(
        write([*ROWS[:2], {"prompt": "x", "completion": "y"}], "dev.jsonl"), chatml, max_length=50
    )
    other = read_examples(write([{"prompt": "x", "completion": "y"}], "other.jsonl"), chatml, max_length=50)
    message = overlap(train, same)
    assert message.startswith("2 of 3 rows of ") and "dev.jsonl are also in" in message
    assert overlap(train, other) == ""
