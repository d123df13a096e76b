"""How processes end, as values for programs, and the words for people, which agent and master share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class ErrorKind(StrEnum):
    """What an exception that ended a worker was about, as that worker reports it."""

    CODE = "code"
    """Anything that the training code, the model or the data pipeline raises."""
    MEMORY = "memory"
    DEVICE = "device"
    """The worker's device failed, or got an input that it cannot compute: no other worker is at fault."""
    PEER = "peer"
    """A collective or a transfer failed: most likely another worker is gone."""
    DATA = "data"
    """The user must change the data, or name other data."""
    JOB = "job"
    """The user must change the job."""

    @property
    def is_users(self) -> bool:
        """Whether the message tells the user what to change."""
        return self in (ErrorKind.DATA, ErrorKind.JOB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    signal: int
    is_out_of_memory: bool = False
    """Whether the kernel sent it, because the group of processes had no memory left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """It is gone, and how is unknown: the process that waited for it had ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """A Python exception ended it."""

    kind: ErrorKind
    message: str
    """What the user must change, if `kind.is_users`; else the last line of the traceback."""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    problem: str


ProcessEnd = Killed | Exited | Unseen

WorkerEnd = Killed | Exited | Unseen | Raised
"""A worker's end. An exception that it reported tells more than the exit code that followed."""

ServerEnd = Killed | Exited | Unseen | NotStarted


def end_text(end: WorkerEnd) -> str:
    """Return how a worker ended, in words: `killed by signal 9`."""
    match end:
        case Killed(signal=signal, is_out_of_memory=is_out_of_memory):
            return f"killed by signal {signal}" + (", the kernel's: its cgroup is out of memory" * is_out_of_memory)
        case Exited(exit_code=code):
            return f"exit code {code}"
        case Raised(message=message):
            return message
        case Unseen():
            return "how is unknown: the process that waited for it had ended before it"
        case _:
            assert_never(end)


def server_end_text(end: ServerEnd) -> str:
    """Return how a fork server ended, in words: `exit code 1`."""
    match end:
        case Killed() | Exited():
            return end_text(end)
        case Unseen():
            return "its connection was lost"
        case NotStarted(problem=problem):
            return f"it cannot be started: {problem}"
        case _:
            assert_never(end)
