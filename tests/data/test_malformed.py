"""Well over a hundred broken inputs, made from good ones: each gives one clear UserError and writes nothing."""

import copy
import csv
import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plora_jax.data.encode import read_examples
from plora_jax.errors import UserError

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
GOOD = {
    "chat": {"messages": TALK},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]},
    "prompt-completion": {"prompt": "Answer:", "completion": " yes"},
    "alpaca": {"instruction": "q", "output": "yes"},
    "text": {"text": "hello world"},
}
WRONG = [None, 7, 1.5, True, ["a"], {"a": "b"}, "\udc00"]  # what may stand where text is due


def leaves(value, path=()):
    """Yield the paths of all texts of a row."""
    if isinstance(value, str):
        yield path
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from leaves(inner, (*path, key))


def replaced(row, path, value):
    row = copy.deepcopy(row)
    at = row
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return row


def removed(row, path):
    row = copy.deepcopy(row)
    at = row
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return row


def bad_rows():
    """Yield (name, row, the field that the message must name)."""
    for name, row in GOOD.items():
        for path in leaves(row):
            field = next(k for k in reversed(path) if isinstance(k, str))
            for value in WRONG:
                if not (isinstance(value, list) and field == "content"):  # a list may hold text parts
                    yield f"{name} {path} {value!r}", replaced(row, path, value), field
            yield f"{name} without {path}", removed(row, path), field if len(path) > 1 else ""
    for name in ("chat", "sharegpt"):
        key = next(iter(GOOD[name]))
        for value in (None, "q", 7, {}, [], [None], ["q"], [[]], [{}], GOOD[name][key][:1]):
            yield f"{name} = {value!r}", {key: value}, key
        yield (
            f"{name} robot",
            replaced(GOOD[name], (key, 0, "role" if name == "chat" else "from"), "robot"),
            key,
        )


BAD_ROWS = list(bad_rows())
LINES = [json.dumps(row) for row in GOOD.values()]


def bad_files():
    """Yield (file name, bytes, the place that the message must name)."""
    good = "\n".join(LINES).encode()
    array = json.dumps(list(GOOD.values()), indent=0).encode()
    for cut in (1, 5, 10, 20):
        yield "a.jsonl", good[:-cut], ", line 5"
        yield "a.json", array[:-cut], ", line "
        yield "a.jsonl.gz", gzip.compress(good)[:-cut], "gz"
    for token in (
        b"\xff",
        b"\xc3\x28",
        b"{",
        b"]",
        b"nul",
        b"'a'",
        b'{"a" 1}',
        b'{"text": "a",}',
        b"\x00",
        b"[1]",
        b"3",
    ):
        yield "a.jsonl", good + b"\n" + token, ", line 6"
        yield "a.jsonl", token + b"\n" + good, ", line 1"
    for name in ("a", "a.txt", "a.jsonl.zip", "a.gz", "a.jsn", ".jsonl"):
        yield name, good, "cannot tell from its name"
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.zst"):
        yield name, b"", "empty"
    for packing in ("gz", "bz2", "xz", "zst"):
        yield f"a.jsonl.{packing}", good, "not compressed"
    yield "a.parquet", good, "parquet"
    empty = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), empty)
    yield "a.parquet", empty.getvalue(), "no row"
    yield "a.json", b"[]", "no row"
    yield "a.json", b"{}", "line 1"
    yield "a.csv", b"prompt,completion\n", "no row"
    yield "a.csv", b"question,answer\na,b\n", "line 2"
    yield "a.csv", b"prompt,completion\na,b\nc\n", "line 3"
    yield "a.csv", b'prompt,completion\na,"b\n', "line 2"
    yield "a.csv", b'prompt,completion\na,"b"c\n', "line 2"
    yield "a.csv", b"prompt,completion\na,\x00\xff\n", "line 2"
    yield "a.jsonl", "\n".join(LINES).encode("utf-16"), "UTF-16"


BAD_FILES = list(bad_files())


def refused(path, tokenizer) -> str:
    before = sorted(path.parent.rglob("*")), path.read_bytes()
    with pytest.raises(UserError) as caught:
        read_examples(path, tokenizer, max_length=50)
    assert (sorted(path.parent.rglob("*")), path.read_bytes()) == before
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 600
    assert caught.value.__cause__ is None  # one message, no chain of technical ones
    return message


def test_there_are_at_least_a_hundred_of_each():
    assert len(BAD_ROWS) >= 100 and len(BAD_FILES) + len(BAD_ROWS) >= 150


@pytest.mark.parametrize(("name", "row", "field"), BAD_ROWS, ids=[name for name, _, _ in BAD_ROWS])
def test_a_row_that_is_no_example_names_file_line_and_field(tmp_path, chatml, name, row, field):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([*LINES, json.dumps(row)]))
    message = refused(path, chatml)
    assert message.startswith(f"{path}, line 6: ") and field in message
    kept = read_examples(path, chatml, max_length=50, on_bad_row="skip")
    assert (len(kept), kept.report.unreadable) == (5, 1)


@pytest.mark.parametrize(
    ("name", "raw", "place"), BAD_FILES, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BAD_FILES)]
)
def test_a_file_that_is_broken_names_the_place(tmp_path, chatml, name, raw, place):
    path = tmp_path / name
    path.write_bytes(raw)
    assert place in refused(path, chatml)


def good_files():
    text = "\n".join(LINES).encode()
    sink, table = io.BytesIO(), io.StringIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD["prompt-completion"]] * 3), sink)
    csv.writer(table).writerows([["prompt", "completion"], ["a", "b"], ['c"\n', "d"]])
    return {
        "a.jsonl": text,
        "a.json": json.dumps(list(GOOD.values())).encode(),
        "a.csv": table.getvalue().encode(),
        "a.parquet": sink.getvalue(),
        "a.jsonl.gz": gzip.compress(text),
    }


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(sorted(good_files())), st.sampled_from(["error", "skip"]))
def test_bytes_changed_anywhere_give_rows_or_one_error(tmp_path, chatml, data, name, on_bad_row):
    raw = bytearray(good_files()[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path / name
    path.write_bytes(raw)
    try:
        assert len(read_examples(path, chatml, max_length=50, on_bad_row=on_bad_row)) > 0
    except UserError as error:
        assert "\n" not in str(error)
