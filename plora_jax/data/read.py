"""Rows of a data file as dictionaries, each with the place it came from."""

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from plora_jax.data.files import ALLOWED, SUFFIXES, file_kind, one_line, read_bytes, text_lines
from plora_jax.errors import UserError

OnBadRow = Literal["error", "skip"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


class Row(NamedTuple):
    """Hold one row's fields and where it stands ("train.jsonl, line 3")."""

    where: str
    fields: dict[str, Any]


@dataclass
class Faults:
    """Raise at the first unreadable row, or count them all: the choice `data.on_bad_row` makes."""

    on_bad_row: OnBadRow = "error"
    messages: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Take note of an unreadable row; UserError unless rows may be skipped."""
        if self.on_bad_row != "skip":
            raise UserError(f"{message} (data.on_bad_row: skip leaves such rows out.)")
        self.messages.append(message)


def read_rows(path: str | Path, faults: Faults) -> Iterator[Row]:
    """Yield the rows of a .jsonl, .json, .csv, .tsv or .parquet file, compressed or not, or a hub data set.

    Rows that cannot be read go to `faults`. UserError when the file itself cannot be read: absent, empty, a
    directory, of unknown suffix, its compression, array, quoting or parquet structure broken.
    """
    file = Path(path)
    if not file.exists():
        if _HUB_NAME.fullmatch(str(path)) and not file.name.lower().endswith(SUFFIXES):
            from plora_jax.data.hub import hub_files

            for part in hub_files(str(path)):
                yield from _parquet(part, read_bytes(part), faults)
            return
        raise UserError(f"{path}: no such file. Give a data file ({ALLOWED}) or a hub data set (owner/name).")
    if file.is_dir():
        read_bytes(file)
    kind, raw = file_kind(file), read_bytes(file)
    if not raw.strip():
        raise UserError(f"{file}: is empty; there is nothing to read in it.")
    if kind == ".parquet":
        yield from _parquet(file, raw, faults)
    elif kind in (".csv", ".tsv"):
        yield from _csv(file, raw, "\t" if kind == ".tsv" else ",", faults)
    elif raw.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        yield from _json_array(file, raw, faults)
    else:
        yield from _json_lines(file, raw, faults)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:  # its own message counts lines from this row's, not the file's
        raise ValueError(f"{error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _json_lines(path: Path, raw: bytes, faults: Faults) -> Iterator[Row]:
    last = raw.count(b"\n") + 1
    for number, line in text_lines(path, raw):
        where = f"{path}, line {number}"
        if line is None:
            faults.add(f"{where}: is not valid UTF-8.")
            continue
        if not line.strip():
            continue
        try:
            value = _parse(line)
        except ValueError as error:
            hint = " The last line has no line end: was the file cut off?" if number == last else ""
            if number == 1 and line.strip() == "{":
                hint = " A file holds one row a line, or an array of rows."
            faults.add(f"{where}: is not valid JSON: {error}.{hint}")
            continue
        if isinstance(value, dict):
            yield Row(where, value)
        else:
            faults.add(f'{where}: holds {a_kind(value)} where an object {{"field": …}} is due.')


def _json_array(path: Path, raw: bytes, faults: Faults) -> Iterator[Row]:
    lines = []
    for number, line in text_lines(path, raw):
        if line is None:
            raise UserError(f"{path}, line {number}: is not valid UTF-8.")
        lines.append(line)
    text = "\n".join(lines)
    decoder, space = json.JSONDecoder(), re.compile(r"\s*")

    def skip(at: int) -> int:
        found = space.match(text, at)
        return found.end() if found else at

    at, at_line, counted = skip(skip(0) + 1), 1, 0
    first = True
    while True:
        at_line += text.count("\n", counted, at)
        counted = at
        where = f"{path}, line {at_line}"
        if first and text[at : at + 1] == "]":
            break
        first = False
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            # nothing after the fault can be trusted to be a row, so this is never skipped
            raise UserError(
                f"{where}: the JSON array is broken here: {getattr(error, 'msg', error)}."
            ) from None
        if isinstance(value, dict):
            yield Row(where, value)
        else:
            faults.add(f'{where}: holds {a_kind(value)} where an object {{"field": …}} is due.')
        at = skip(at)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise UserError(
                f"{where}: the JSON array is cut off or misses a comma after the row that starts here."
            )
        at = skip(at + 1)
    if text[at + 1 :].strip():
        raise UserError(f"{path}, line {at_line}: text follows the end of the JSON array.")


def _csv(path: Path, raw: bytes, delimiter: str, faults: Faults) -> Iterator[Row]:
    bad: list[int] = []
    csv.field_size_limit(sys.maxsize)  # of the module: it takes 131,072 characters for a broken quote

    def decoded() -> Iterator[str]:
        for number, line in text_lines(path, raw):
            if line is None:
                bad.append(number)
                line = ""
            yield line + "\n"

    reader = csv.reader(decoded(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            # an open quote swallows the rest of the file, so this is never skipped
            raise UserError(f"{path}, line {start}: is not valid CSV: {error}.") from None
        where, start = f"{path}, line {start}", reader.line_num + 1
        if bad:
            faults.add(f"{path}, line {bad[0]}: is not valid UTF-8.")
            bad.clear()
        elif not any(cells):
            continue
        elif header is None:
            header = cells
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise UserError(f"{where}: the header names column {twice[0]!r} twice.")
        elif len(cells) != len(header):
            faults.add(f"{where}: has {len(cells)} cells where the header names {len(header)} columns.")
        else:
            yield Row(where, dict(zip(header, cells, strict=True)))


def _parquet(path: Path, raw: bytes, faults: Faults) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(io.BytesIO(raw))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: is not a readable parquet file: {one_line(error)}.") from None
    for number in range(table.num_rows):
        where = f"{path}, row {number + 1}"
        try:
            fields = table.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError:
            faults.add(f"{where}: is not valid UTF-8.")
            continue
        yield Row(where, fields)


def a_kind(value: Any) -> str:
    """Name a JSON value's kind as its author would."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return f"a value of type {type(value).__name__}"
