"""Opens a file, standard input or a pipe once, decompresses it and decodes its lines in a stream."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import lzma
import select
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pyarrow

from electra_fast.errors import InputError

STANDARD_INPUT = Path("-")
# Enough to detect the line ends of a file. Less is read from a pipe that holds less.
_CHUNK_BYTES = 1 << 18
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MARKS = {  # UTF-32 before UTF-16, whose mark is a prefix
    codecs.BOM_UTF8: "UTF-8",
    codecs.BOM_UTF32_LE: "UTF-32-LE",
    codecs.BOM_UTF32_BE: "UTF-32-BE",
    codecs.BOM_UTF16_LE: "UTF-16-LE",
    codecs.BOM_UTF16_BE: "UTF-16-BE",
}
_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "xz": lzma.LZMAFile,
    "zstd": lambda raw: io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")),
}
_NOT_TEXT = {
    b"PK\x03\x04": "a spreadsheet or another zip archive; save it as CSV",
    b"\xd0\xcf\x11\xe0": "a spreadsheet; save it as CSV",
    b"PAR1": "Parquet; name it .parquet",
}


class TextFile:
    """A file that is read once. Compression is detected from its first bytes, the encoding from a byte order mark.

    Args:
        path: The file; `-` is standard input.

    Raises FileNotFoundError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_waiting = 0
        self.is_regular = path != STANDARD_INPUT and path.is_file()
        if path != STANDARD_INPUT and not path.exists():
            raise FileNotFoundError(f"{path}: no such file")
        is_standard = path == STANDARD_INPUT
        self._raw = io.BufferedReader(io.FileIO(0 if is_standard else path, closefd=not is_standard), _CHUNK_BYTES)
        self._stream: Any = self._raw
        first = self._raw.peek(8)[:8]
        self._compression = next((name for magic, name in _COMPRESSIONS.items() if first.startswith(magic)), None)
        if self._compression:
            self._stream = _DECOMPRESSORS[self._compression](self._raw)
        self.head = self._read()
        """The first bytes; empty only if the file is empty."""
        self._mark = next((mark for mark in _MARKS if self.head.startswith(mark)), b"")
        self.encoding = _MARKS.get(self._mark, "UTF-8")
        """Encoding from the byte order mark; UTF-8 without a mark."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._raw.close()

    @property
    def is_plain(self) -> bool:
        """True if another reader can open the path directly."""
        return self.is_regular and not self._compression

    def is_idle(self) -> bool:
        """Returns whether the next line of a pipe has not arrived yet."""
        if self._num_waiting or self.is_regular or self._compression:
            return False
        return not select.select([self._raw], [], [], 0)[0]

    def content(self) -> bytes:
        return b"".join((self.head, *iter(self._read, b"")))

    def lines(self) -> Iterator[str]:
        """Yields decoded lines with their ends, LF or CRLF; a lone CR and Unicode line separators are part of the text.

        If the first lines end in CR alone, as in files from old spreadsheets, CR ends all lines. Raises InputError with
        the place of bytes that are not text.
        """
        self._check_text()
        decoder = codecs.getincrementaldecoder(self.encoding)()
        number = 0
        offset = len(self._mark)
        parts = [""]
        end = "\n"
        for chunk in itertools.chain((self.head[offset:],), iter(self._read, b""), (b"",)):
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                number += 1 + "".join(parts).count(end)
                raise InputError(self._undecodable(error, number, offset - pending, end)) from None
            offset += len(chunk)
            if not number and "\n" not in text and "\r" in text[:-1] and len(parts) == 1:
                end = "\r"
            parts.append(text)
            if end not in text and chunk:
                continue
            *whole, rest = "".join(parts).split(end)
            parts = [rest]
            self._num_waiting = len(whole)
            for line in whole:
                number = number + 1
                self._num_waiting = self._num_waiting - 1
                yield line + "\n"
        if parts[0]:
            yield parts[0]

    def _read(self) -> bytes:
        if not self._compression:
            return bytes(self._stream.read1(_CHUNK_BYTES))
        try:
            return bytes(self._stream.read(_CHUNK_BYTES))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            self._raw.close()
            reason = " ".join(str(error).split())
            if "too much memory" in reason:
                remedy = "decompress it with `zstd -d --long=31`"
                raise InputError(f"{self.path}: its zstd window is over 128 MiB; {remedy}") from None
            raise InputError(f"{self.path}: damaged {self._compression} ({reason}); download the file again") from None

    def _check_text(self) -> None:
        kind = next((name for magic, name in _NOT_TEXT.items() if self.head.startswith(magic)), None)
        if kind:
            raise InputError(f"{self.path}: not text but {kind}")
        if self.encoding == "UTF-8" and (b"\n\0" in self.head or b"\0\n" in self.head):
            remedy = "convert the file with `iconv -f UTF-16LE -t UTF-8`"
            raise InputError(f"{self.path}: line 1: NUL bytes, as in UTF-16 without a byte order mark; {remedy}")

    def _undecodable(self, error: UnicodeDecodeError, number: int, offset: int, end: str) -> str:
        number += error.object[: error.start].decode(self.encoding).count(end)
        place = f"{self.path}: line {number}: not {self.encoding} at byte {offset + error.start:,}"
        if self.encoding != "UTF-8":
            return f"{place}; download the file again"
        return f"{place}; convert the file to UTF-8, from Windows-1252 with `iconv -f CP1252 -t UTF-8`"
