"""Lines that a failing disk has taken in part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from oobleck.runtime.files.line_file import LineFile


class FailingDisk:
    """Takes `room` more bytes, and cuts nothing off, until `is_well` again."""

    def __init__(self) -> None:
        self.room, self.is_well = 0, False
        self._write, self._ftruncate = os.write, os.ftruncate

    def write(self, descriptor: int, data: bytes) -> int:
        if self.is_well:
            return self._write(descriptor, data)
        taken, self.room = data[: self.room], max(0, self.room - len(data))
        if not taken:
            raise OSError(errno.EIO, "Input/output error")
        return self._write(descriptor, taken)

    def ftruncate(self, descriptor: int, size: int) -> None:
        if not self.is_well:
            raise OSError(errno.EIO, "Input/output error")
        self._ftruncate(descriptor, size)


def test_no_line_follows_a_torn_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half of a line, and cannot cut it off: what comes later waits until it can."""
    file = LineFile(tmp_path / "lines", clock=iter(range(0, 1000, 10)).__next__)
    disk = FailingDisk()
    monkeypatch.setattr(os, "write", disk.write)
    monkeypatch.setattr(os, "ftruncate", disk.ftruncate)
    disk.room = 3
    file.write(b"first\n")
    disk.room = 100
    file.write(b"second\n")
    assert (tmp_path / "lines").read_bytes() == b"fir"
    disk.is_well = True
    file.write(b"third\n")
    assert (tmp_path / "lines").read_bytes() == b"first\nsecond\nthird\n"
    assert file.is_whole
    assert file.problem is None
    file.close()
