"""The base of all journal entries, and of the enums in them: facts for decisions, and words for people."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from oobleck.planner import WorkerId


class Worded(StrEnum):
    """An enum whose members have words next to their values: `NOTHING = "nothing", "Nothing to do."`."""

    template: str

    def __new__(cls, value: str, template: str) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.template = value, template
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the journal."""

    # Not an ABC, whose `isinstance` is slow: months of training make millions of entries.
    t_s: float

    @property
    def level(self) -> str:
        """Its severity: info, warning or error."""
        return "info"

    @property
    @abstractmethod
    def sentence(self) -> str:
        """All of it for people, without its time. No program reads it."""

    def evidence(self, worker_id: WorkerId | None) -> str:
        """Say what shows that something is wrong, with this worker or none in particular."""
        return self.sentence

    def detail(self, worker_id: WorkerId | None) -> str:
        """Return further lines: a traceback, a stack; empty where there are none."""
        return ""
