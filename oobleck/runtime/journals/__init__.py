"""Journals on disk: writing, reading (whole or from an image), finding, and following them while they grow."""

from __future__ import annotations

from .journal_file import (
    JournalWriter,
    aside_of,
    find_journal,
    follow_journal,
    has_end,
    put_back,
    read_entries,
    read_journal,
    read_losses,
    set_aside,
)
from .journal_image import read_image, write_image

__all__ = [
    "JournalWriter",
    "aside_of",
    "find_journal",
    "follow_journal",
    "has_end",
    "put_back",
    "read_entries",
    "read_image",
    "read_journal",
    "read_losses",
    "set_aside",
    "write_image",
]
