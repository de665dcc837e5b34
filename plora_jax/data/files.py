"""Bytes of a data file: opened, decompressed and split into UTF-8 lines, every fault named."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

from plora_jax.errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".bz2", ".xz", ".zst")
ALLOWED = f"{', '.join(SUFFIXES)}, each also with {', '.join(PACKED)}"
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, shortened, or its kind when it has none."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= 200 else f"{message[:200]} …"


def file_kind(path: Path) -> str:
    """Return the file's suffix without its compression: one of SUFFIXES; UserError for any other name."""
    names = [s.lower() for s in path.suffixes]
    if names and names[-1] in PACKED:
        names.pop()
    if not names or names[-1] not in SUFFIXES:
        raise UserError(f"{path}: cannot tell from its name how to read it. Data files end in {ALLOWED}.")
    return names[-1]


def read_bytes(path: Path) -> bytes:
    """Return the file's content, decompressed when its first bytes (not its name) say so."""
    if path.is_dir():
        raise UserError(f"{path}: is a directory, not a data file. Name one file in it ({ALLOWED}).")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or one_line(error)}.") from None
    packing = next((name for magic, name in _MAGIC.items() if raw.startswith(magic)), None)
    if packing is None:
        if raw and path.suffix.lower() in PACKED:
            raise UserError(f"{path}: ends in {path.suffix} but is not compressed that way.")
        return raw
    try:
        return _unpack(raw, packing)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise UserError(f"{path}: the {packing} data is broken or cut off: {one_line(error)}.") from None


def _unpack(raw: bytes, packing: str) -> bytes:
    if packing == ".gz":
        return gzip.decompress(raw)
    if packing == ".bz2":
        return bz2.decompress(raw)
    if packing == ".xz":
        return lzma.decompress(raw)
    import pyarrow

    with pyarrow.CompressedInputStream(io.BytesIO(raw), "zstd") as stream:
        return stream.read()


def text_lines(path: Path, raw: bytes) -> Iterator[tuple[int, str | None]]:
    """Yield (line number from 1, its text without line end), or None as the text where it is not UTF-8.

    A byte-order mark is dropped and CRLF ends a line as LF does. UTF-16 is a UserError.
    """
    if raw.startswith(_UTF16):
        raise UserError(f"{path}: is UTF-16 text. Save it as UTF-8.")
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(raw.split(b"\n"), start=1):
        try:
            yield number, line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            yield number, None
