"""How processes end, as values: what a signal, an exit code or an exception says, and nothing that must be read.

The words for people are here too, since both the agent that sees an end and the master that hears of it say them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class ErrorKind(StrEnum):
    """What an exception that ended a worker was about. The worker says it, for it holds the exception."""

    CODE = "code"
    """Anything that the training code, the model or the data pipeline raises."""
    MEMORY = "memory"
    """No memory was left, on the device or in the machine."""
    DEVICE = "device"
    """What the worker computes with has failed, or was given what it cannot compute: no other worker is to blame."""
    PEER = "peer"
    """A collective or a transfer failed: most likely another worker is gone."""
    DATA = "data"
    """The data cannot be used as it is: the user must change it, or name another."""
    JOB = "job"
    """The job cannot be run as it is: the user must change it."""

    @property
    def is_users(self) -> bool:
        """Whether the message says what the user must change."""
        return self in (ErrorKind.DATA, ErrorKind.JOB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A signal ended it."""

    signal: int
    is_out_of_memory: bool = False
    """Whether it was the kernel's, because the group of processes had no memory left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """It ended by itself."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """It is gone, and how is not known: the process that waited for it had ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """A Python exception ended it."""

    kind: ErrorKind
    message: str
    """What the user must change, if it is the user's to change; else the last line of the traceback."""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """It could not even be started."""

    problem: str


ProcessEnd = Killed | Exited | Unseen
"""What the operating system says of an end."""

WorkerEnd = Killed | Exited | Unseen | Raised
"""How a worker ended. An exception that it reported says more than the exit code that followed."""

ServerEnd = Killed | Exited | Unseen | NotStarted
"""How the process that forks workers ended."""


def end_text(end: WorkerEnd) -> str:
    """How a worker ended: `killed by signal 9`."""
    match end:
        case Killed(signal=signal, is_out_of_memory=is_out_of_memory):
            return f"killed by signal {signal}" + (", the kernel's: its cgroup is out of memory" * is_out_of_memory)
        case Exited(exit_code=code):
            return f"exit code {code}"
        case Raised(message=message):
            return message
        case Unseen():
            return "how is not known: the process that waited for it had ended before it"
        case _:
            assert_never(end)


def server_end_text(end: ServerEnd) -> str:
    """How a fork server ended: `exit code 1`."""
    match end:
        case Killed() | Exited():
            return end_text(end)
        case Unseen():
            return "its connection was lost"
        case NotStarted(problem=problem):
            return f"it cannot be started: {problem}"
        case _:
            assert_never(end)
