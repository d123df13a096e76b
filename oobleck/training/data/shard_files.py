"""Files as shards: rows of tokens, or lines of text. They may grow at their ends while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oobleck.errors import ShardUnreadable
from oobleck.job import DataSpec

from .shard_reader import Extent, RecordText, text_in_json
from .text import JSON_LINES

_LONGEST_LINE = 64 << 20
_BLOCK_BYTES = 1 << 20


class _File:
    """A file that is read by offset, and may grow."""

    def __init__(self, path: Path, *, follows: bool) -> None:
        self.path = path
        self._follows = follows
        self._end_mark = path.with_name(path.name + ".end")

    def is_complete(self) -> bool:
        return not self._follows or self._end_mark.exists()

    def size(self) -> int:
        """Return the present size in bytes; 0 if it does not exist yet."""
        try:
            return os.stat(self.path).st_size
        except OSError as error:
            if self._follows and isinstance(error, FileNotFoundError):
                return 0
            raise ShardUnreadable(f"{error.strerror}") from error

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer at the end."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except OSError as error:
            raise ShardUnreadable(f"{error.strerror}") from error


class TokenShard:
    """Rows of tokens in a .bin file, which is nothing but tokens, or a .npy file. A position is a row's number."""

    def __init__(self, path: Path, data: DataSpec) -> None:
        self._length = data.sequence_length
        self._dtype: np.dtype[np.generic] = np.dtype(data.token_dtype).newbyteorder("<")
        self._offset, self._num_tokens = 0, None
        if path.suffix == ".npy":
            self._dtype, self._offset, self._num_tokens = _npy_header(path)
        self._row_bytes = self._length * self._dtype.itemsize
        # The header of a .npy file fixes its number of tokens, so it cannot grow.
        self._file = _File(path, follows=data.follow and path.suffix != ".npy")

    def survey(self, start: int, limit: int) -> Extent:
        """See `ShardReader`. An incomplete row at the end is dropped."""
        # Before the size, or a write between the two would be missed.
        is_complete = self._file.is_complete()
        num_tokens = self._num_tokens
        if num_tokens is None:
            num_tokens = self._file.size() // self._dtype.itemsize
        num_rows = num_tokens // self._length
        if num_rows < start:
            raise ShardUnreadable(f"it has {num_rows} rows, and had {start} before")
        stop = min(start + limit, num_rows)
        return Extent(bounds=tuple(range(start, stop + 1)), is_end=is_complete and stop == num_rows)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        assert stop == start + 1, (start, stop)
        offset = self._offset + start * self._row_bytes
        content = self._file.read(offset, offset + self._row_bytes)
        if len(content) < self._row_bytes:
            raise ShardUnreadable(f"row {start} is not whole: {len(content)} of {self._row_bytes} bytes are there")
        return np.frombuffer(content, dtype=self._dtype).astype(np.int64)


def _npy_header(path: Path) -> tuple[np.dtype[np.generic], int, int]:
    """Return (dtype, offset of the first token in bytes, number of tokens) of a .npy file."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ShardUnreadable(f"it is no array of tokens: {error}") from error
    if mapped.dtype.kind not in "iu" or not mapped.flags.c_contiguous:
        raise ShardUnreadable(f"it holds {mapped.dtype}, which are no tokens")
    return mapped.dtype, int(mapped.offset), int(mapped.size)


class LineShard:
    """Lines of text: each line that is not blank is a record. A position is the byte where a line begins."""

    def __init__(self, path: Path, data: DataSpec, text: RecordText) -> None:
        self._text = text
        self._column = data.text_column if path.suffix in JSON_LINES else None
        self._file = _File(path, follows=data.follow)

    def survey(self, start: int, limit: int) -> Extent:
        """See `ShardReader`. An unterminated last line is a record once the file is complete."""
        is_complete = self._file.is_complete()  # before the size, as in `TokenShard`
        size = self._file.size()
        if size < start:
            raise ShardUnreadable(f"it has {size} bytes, and had {start} before")
        bounds, items = [start], []
        for stop, line in self._lines(start, size, is_complete=is_complete):
            if not line.strip():
                continue
            try:
                items.append(self._text.num_items(self._text_of(line)))
            except ShardUnreadable:
                # The records before it are reported first.
                if items:
                    return Extent(bounds=tuple(bounds), items=tuple(items))
                raise
            bounds.append(stop)
            if len(items) == limit:
                return Extent(bounds=tuple(bounds), items=tuple(items), is_end=is_complete and stop == size)
        return Extent(bounds=tuple(bounds), items=tuple(items), is_end=is_complete)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        content = self._file.read(start, stop)
        lines = [line for line in content.split(b"\n") if line.strip()]
        if len(content) < stop - start or len(lines) != 1:
            raise ShardUnreadable(f"the line that ended at byte {stop} is not there any more")
        return self._text.row(self._text_of(lines[0]))

    def _lines(self, start: int, size: int, *, is_complete: bool) -> Iterator[tuple[int, bytes]]:
        """Yield (end position, line)."""
        at, rest = start, b""
        while at + len(rest) < size:
            block = self._file.read(at + len(rest), min(at + len(rest) + _BLOCK_BYTES, size))
            if not block:
                return
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            for line in lines:
                at += len(line) + 1
                yield at, line
            if len(rest) > _LONGEST_LINE:
                raise ShardUnreadable(f"the line at byte {at} is longer than {_LONGEST_LINE >> 20} MiB")
        # In a file that still grows, a line without an end may be half of one.
        if rest and is_complete:
            yield at + len(rest), rest

    def _text_of(self, line: bytes) -> str:
        if self._column is None:
            return line.decode(errors="replace")
        return text_in_json(line, self._column, where="a line")
