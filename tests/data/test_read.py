"""Files as people have them: every kind of file and fault, with the file, the line and the right rows."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest

from plora_jax.data.read import Faults, read_rows
from plora_jax.errors import UserError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ü\u2028", "completion": "d\ne"}]
LINES = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS).encode()


def rows_of(path, on_bad_row="error"):
    faults = Faults(on_bad_row)
    return [r.fields for r in read_rows(path, faults)], faults


def put(tmp_path, name, raw):
    path = tmp_path / name
    path.write_bytes(raw)
    return path


def fails(path) -> str:
    with pytest.raises(UserError) as caught:
        rows_of(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def zstd(raw: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.jsonl", LINES),
        ("a.JSONL", LINES),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n")),
        ("a.jsonl", b"\n  \n" + LINES.replace(b"\n", b"\n\n")),
        ("a.jsonl", LINES.rstrip(b"\n")),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("a.json", b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode()),
        ("a.jsonl", json.dumps(ROWS).encode()),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.gz", gzip.compress(LINES[:30], mtime=0) + gzip.compress(LINES[30:], mtime=0)),
        ("a.jsonl.bz2", bz2.compress(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES)),
        ("a.jsonl.zst", zstd(LINES)),
        ("a.jsonl", gzip.compress(LINES, mtime=0)),
        ("a.csv", 'prompt,completion\na,b\n"ü\u2028","d\ne"\n'.encode()),
        (
            "a.csv.gz",
            gzip.compress('\ufeffprompt,completion\r\na,b\r\n\r\nü\u2028,"d\r\ne"\r\n'.encode(), mtime=0),
        ),
        ("a.tsv", 'completion\tprompt\nb\ta\n"d\ne"\tü\u2028\n'.encode()),
    ],
)
def test_the_same_rows_come_out_of_every_kind_of_text_file(tmp_path, name, raw):
    assert rows_of(put(tmp_path, name, raw))[0] == ROWS


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert rows_of(path)[0] == ROWS


def test_line_numbers_count_blank_and_quoted_lines(tmp_path):
    lines = put(tmp_path, "a.jsonl", b"\n" + LINES.replace(b"\n", b"\n\n"))
    assert [r.where for r in read_rows(lines, Faults())] == [f"{lines}, line 2", f"{lines}, line 4"]
    array = put(tmp_path, "a.json", json.dumps(ROWS, indent=1).encode())
    assert [r.where for r in read_rows(array, Faults())] == [f"{array}, line 2", f"{array}, line 6"]
    table = put(tmp_path, "a.csv", b'prompt,completion\n"x\ny",b\na,b\n')
    assert [r.where for r in read_rows(table, Faults())] == [f"{table}, line 2", f"{table}, line 4"]


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        (
            "a.jsonl",
            LINES + b'{"prompt": "a", "compl',
            "line 3: is not valid JSON: Unterminated string starting at (column 17)",
        ),
        ("a.jsonl", LINES + b'{"prompt": "a", "compl', "was the file cut off?"),
        ("a.jsonl", LINES + b"\xff\xfe\n", "line 3: is not valid UTF-8"),
        ("a.jsonl", LINES + b'"text"\n', "line 3: holds text where an object"),
        ("a.jsonl", LINES + b"[1]\n", "line 3: holds a list where an object"),
        ("a.jsonl", LINES + b"null\n", "line 3: holds null where an object"),
        ("a.jsonl", LINES + b"7\n", "line 3: holds the number 7 where an object"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000, "line 1: is not valid JSON: nested too deeply"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "is UTF-16 text. Save it as UTF-8."),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b" \n\n", "is empty"),
        ("a.json", b'{\n "prompt": "a"\n}', "line 1: is not valid JSON: Expecting property name"),
        ("a.json", b'{\n "prompt": "a"\n}', "A file holds one row a line, or an array of rows."),
        ("a.json", b'[{"prompt": "a"},\n{"prompt": ', "line 2: the JSON array is broken here"),
        ("a.json", b'{\n "prompt": "a"\n}', "line 1: is not valid JSON: Expecting property name"),
        ("a.json", b'{\n "prompt": "a"\n}', "A file holds one row a line, or an array of rows."),
        ("a.json", b'[{"prompt": "a"}\n', "line 1: the JSON array is cut off or misses a comma"),
        ("a.json", b'{\n "prompt": "a"\n}', "line 1: is not valid JSON: Expecting property name"),
        ("a.json", b'{\n "prompt": "a"\n}', "A file holds one row a line, or an array of rows."),
        ("a.json", b'[{"prompt": "a"},\n 7]', "line 2: holds the number 7 where an object"),
        ("a.json", b'[{"a": 1}]\n{"a": 2}\n', "text follows the end of the JSON array"),
        ("a.json", b'[{"a": "\xff"}]', "line 1: is not valid UTF-8"),
        ("a.csv", b"prompt,completion\na\n", "line 2: has 1 cells where the header names 2 columns"),
        ("a.csv", b"prompt,completion\na,b,c\n", "line 2: has 3 cells where the header names 2 columns"),
        ("a.csv", b"prompt,prompt\na,b\n", "line 1: the header names column 'prompt' twice"),
        ("a.csv", b'prompt,completion\na,b\n"a,b\n', "line 3: is not valid CSV"),
        ("a.csv", b"prompt,completion\na,\xff\n", "line 2: is not valid UTF-8"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], ".gz data is broken or cut off"),
        ("a.jsonl.bz2", bz2.compress(LINES)[:-9], ".bz2 data is broken or cut off"),
        ("a.jsonl.xz", lzma.compress(LINES)[:-9], ".xz data is broken or cut off"),
        ("a.jsonl.zst", zstd(LINES * 50)[:20], ".zst data is broken or cut off"),
        ("a.jsonl.gz", LINES, "ends in .gz but is not compressed"),
        ("a.parquet", LINES, "is not a readable parquet file"),
        ("a.txt", LINES, "cannot tell from its name"),
        ("a", LINES, "cannot tell from its name"),
        ("a.gz", gzip.compress(LINES, mtime=0), "cannot tell from its name"),
    ],
)
def test_faults_name_the_file_and_the_line(tmp_path, name, raw, says):
    assert says in fails(put(tmp_path, name, raw))


def test_absent_files_and_directories(tmp_path):
    assert "no such file" in fails(tmp_path / "absent.jsonl")
    assert "is a directory" in fails(tmp_path)
    (tmp_path / "d.jsonl").mkdir()
    assert "is a directory" in fails(tmp_path / "d.jsonl")


def test_hub_names_that_cannot_be_reached_say_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub

    monkeypatch.setattr("plora_jax.data.hub.why_unreachable", lambda: "")

    def refuse(*_, **__):
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    message = fails("some-owner/some-data")
    assert "could not be fetched (no route to the hub more)" in message and "local file" in message


def test_a_hub_split_is_read_from_its_parquet_files(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr("plora_jax.data.hub.why_unreachable", lambda: "")
    listed = [
        "default/train/0000.parquet",
        "default/train/0001.parquet",
        "default/test/0000.parquet",
        "x/train/0.parquet",
    ]
    for i, name in enumerate(listed):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {i}"]}), tmp_path / name)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: [*listed, "README.md"])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name, **__: str(tmp_path / name))
    assert rows_of("owner/data")[0] == [{"text": "row 0"}, {"text": "row 1"}]
    assert rows_of("owner/data:test")[0] == [{"text": "row 2"}]
    with pytest.raises(UserError, match="no split 'dev'; it has test, train"):
        rows_of("owner/data:dev")


def test_skipping_counts_the_bad_rows_and_keeps_the_others(tmp_path):
    raw = b"{broken\n" + LINES + b"\xff\n[]\n"
    rows, faults = rows_of(put(tmp_path, "a.jsonl", raw), "skip")
    assert rows == ROWS
    assert [m.split(": ")[0].rsplit(", ", 1)[1] for m in faults.messages] == ["line 1", "line 4", "line 5"]
    rows, faults = rows_of(put(tmp_path, "a.csv", b"prompt,completion\na\na,b\n\xff,b\n"), "skip")
    assert rows == [{"prompt": "a", "completion": "b"}] and len(faults.messages) == 2


def test_a_cell_may_be_as_long_as_a_book(tmp_path):
    rows, _ = rows_of(put(tmp_path, "a.csv", b"prompt,completion\n" + b"x" * 200_000 + b",b\n"))
    assert rows == [{"prompt": "x" * 200_000, "completion": "b"}]
