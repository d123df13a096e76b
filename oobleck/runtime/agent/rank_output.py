"""What a rank writes to a stream, and the order in which it is shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CHUNK_BYTES = 1 << 15
_OVERFLOW_BYTES = 1 << 20
_TAIL_BYTES = 4096
_TAIL_LINES = 20


class RankOutput:
    """The output of a rank's stream: a file, and the overflow that the file could not take."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._num_ordered = 0  # bytes of the file, whose place among what it did not take is known
        self._overflow: deque[tuple[int, bytes]] = deque()  # not shown yet; (bytes of the file before it, data)
        self._overflow_end = b""
        self._num_overflow = 0
        self._pending = b""
        self._parts: list[tuple[bool, bytes]] = []  # the parts of `_pending`, each from the file or not

    def overflow(self, data: bytes, after: int) -> None:
        """Note data that the file could not take after its first `after` bytes."""
        self._overflow.append((after, data))
        self._num_overflow += len(data)
        self._overflow_end = (self._overflow_end + data)[-_TAIL_BYTES:]
        self.note_ordered(after)

    def note_ordered(self, num_bytes: int) -> None:
        """Note that no more data will come that was written before the end of the file's first `num_bytes`."""
        self._num_ordered = max(self._num_ordered, num_bytes)

    def num_written(self) -> int:
        """Return the bytes of the file."""
        with suppress(OSError):
            return self.path.stat().st_size
        return 0

    @property
    def is_behind(self) -> bool:
        """Whether much is not shown yet that the file did not take."""
        return sum(len(data) for _, data in self._overflow) > _OVERFLOW_BYTES

    def new(self, *, is_last: bool) -> str:
        """Return the next whole lines, up to a chunk; a longer line is cut."""
        if not self._pending:
            self._parts = list(self._next_parts())
            self._pending = b"".join(part for _, part in self._parts)
        if not is_last and len(self._pending) < _CHUNK_BYTES:
            self._pending = self._pending[: self._pending.rfind(b"\n") + 1]
        # Surrogates (PEP 383) keep bytes that are not UTF-8, such as parts of a cut character.
        return self._pending.decode(errors="surrogateescape")

    def _next_parts(self) -> Iterator[tuple[bool, bytes]]:
        """Yield the parts of the next chunk in the order of writing."""
        written, offset = b"", self._offset
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(offset)
            written = file.read(min(_CHUNK_BYTES, max(0, self._num_ordered - offset)))
        num_left = _CHUNK_BYTES
        for after, data in self._overflow:
            before = written[: max(0, after - offset)]
            yield True, before
            written, offset = written[len(before) :], offset + len(before)
            num_left -= len(before) + len(data)
            # The file has more text before this data than the chunk, so the data waits for a later chunk.
            if offset < after:
                return
            yield False, data
            if num_left <= 0:
                return
        yield True, written[:num_left]

    def note_shown(self) -> None:
        num_left = len(self._pending)
        for is_of_file, part in self._parts:
            num_shown = min(num_left, len(part))
            num_left -= num_shown
            if is_of_file:
                self._offset += num_shown
            elif num_shown:
                after, data = self._overflow.popleft()
                if num_shown < len(data):
                    self._overflow.appendleft((after, data[num_shown:]))
        self._pending = b""

    def size(self) -> int:
        return self.num_written() + self._num_overflow

    def tail(self) -> str:
        last = b""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
            last = file.read()
        return "\n".join((last + self._overflow_end).decode(errors="replace").splitlines()[-_TAIL_LINES:])
