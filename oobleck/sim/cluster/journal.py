"""The journal of a virtual run, kept in memory: the twin of `runtime.journals.journal_file`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from oobleck.control.journal import JournalEntry
from oobleck.control.speed import LINK_KEYS
from oobleck.wire import encode_json


class MemoryJournal:
    """Implements `roles.master_ports.Journal`."""

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []

    def append(self, entry: JournalEntry) -> None:
        self.entries.append(entry)


class MemoryProfiles:
    """Implements `roles.master_ports.ProfileCache`."""

    def __init__(self, profile_json: str | None) -> None:
        """`profile_json` is there for every key of a profile; None for none but those that are stored."""
        self.profile_json = profile_json
        self._stored: dict[str, str] = {}

    def load(self, key: str) -> str | None:
        return self._stored.get(key, None if key.startswith(LINK_KEYS) else self.profile_json)

    def store(self, key: str, profile_json: str) -> None:
        self._stored[key] = profile_json


def journal_digest(entries: Iterable[JournalEntry]) -> str:
    """Return a digest of everything that a journal says: equal for equal runs, in any process."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(encode_json(entry) + b"\n")
    return digest.hexdigest()
