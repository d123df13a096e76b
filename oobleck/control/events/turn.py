"""The turn of one event or deadline: its time, and the commands so far. Parts pass it along in their calls.

A turn belongs to one call: no part keeps it, or its time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from oobleck.control.journal import JournalEntry, Notice
from oobleck.control.protocol import MasterMessage
from oobleck.errors import ExitCode

from .inputs import Command, Record, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """The run is finished, or cannot continue."""

    reason: str
    exit_code: int = ExitCode.FAILED


class RunOver(Exception):
    """The run ends, and this turn with it. Its commands so far stay."""

    def __init__(self, end: EndRun) -> None:
        super().__init__(end.reason)
        self.end = end


class Turn:
    """Collects commands, in their order."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.commands: list[Command] = []

    def do(self, effects: Iterable[Command | EndRun]) -> None:
        """Add the commands that a part has returned. Raises RunOver if one ends the run."""
        for effect in effects:
            if isinstance(effect, EndRun):
                raise RunOver(effect)
            self.commands.append(effect)

    def record(self, entry: JournalEntry) -> None:
        self.commands.append(Record(entry=entry))

    def send(self, node: str, message: MasterMessage) -> None:
        self.commands.append(Send(node=node, message=message))

    def note(self, level: str, text: str) -> None:
        """Append a text for people to the journal."""
        self.commands.append(notice(self.now_s, level, text))

    def end(self, reason: str, exit_code: int = ExitCode.FAILED) -> NoReturn:
        """End the run: raises RunOver."""
        raise RunOver(EndRun(reason=reason, exit_code=exit_code))


def notice(now_s: float, level: str, text: str) -> Record:
    """Return the command that appends a text for people to the journal."""
    return Record(entry=Notice(t_s=now_s, level=level, text=text))
