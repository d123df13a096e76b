"""Every error that Oobleck raises on purpose, split by who is to blame.

    OobleckError
    ├── UserError             bad input; the message says what to change
    │   ├── UsageError        the command line                                 (exit code 2)
    │   └── ConfigError       a file: job, hostfile, profile, trace            (exit code 78)
    │       ├── DataError     the data that a job names                        (exit code 78)
    │       ├── UnbuiltModel  a script's model that cannot be built here       (exit code 78)
    │       ├── UncutModel    a model that cannot be cut into stages           (exit code 78)
    │       └── PlanningError no plan satisfies what was asked for             (exit code 78)
    ├── PeerError             the other side broke the protocol
    ├── BadStep               a script's loss is not a number, or jumps
    ├── RunFailed             a launched run has not ended as it should
    └── ResourceLost          the world took something away
        ├── NodeUnreachable   a node cannot be reached, or its environment does not fit
        │   ├── FaultyNode    it is faulty
        │   └── AgentGone     no agent of ours lives there any more
        ├── WorkersUnavailable no worker process can be started on a node
        ├── Unrecoverable     a layer has no living copy
        ├── CorruptCheckpoint saved bytes cannot be read, or have changed
        │   └── StatesLost    a script's states were saved, and none is whole and readable any more
        └── ShardUnreadable   a record of the data cannot be read any more

Bugs of our own are assertions, not members of this tree.
"""

from __future__ import annotations

from enum import IntEnum

_SHOWN_CHARS = 200


class OobleckError(Exception):
    """The root of the tree; carries a message fit to be shown to a person."""


class UserError(OobleckError):
    """Input that cannot be used as it is; the message names the value, the place and what to change."""


class UsageError(UserError):
    """A command line that asks for something impossible."""


class ConfigError(UserError):
    """A file (job, hostfile, profile, trace) that cannot be used as it is."""


class DataError(ConfigError):
    """The data that a job names cannot be used as it is."""


class UnbuiltModel(ConfigError):
    """A script's model that cannot be built on this machine, for instance as only nodes have its files."""


class UncutModel(ConfigError):
    """A model that cannot be cut into stages. A Trainer's is then kept whole."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message.removeprefix("model: ")


class PlanningError(ConfigError):
    """No execution plan satisfies the model, the nodes and the options given."""


class PeerError(OobleckError):
    """A message or a connection that breaks the protocol."""


class RunFailed(OobleckError):
    """A run of `oobleck.launch` that has not ended as it should.

    `exit_code` is that of `oobleck up`; `traceback` is that of the exception that ended the workers, or empty.
    """

    def __init__(self, reason: str, *, exit_code: int, traceback: str = "") -> None:
        super().__init__(f"{reason}\n\n{traceback}".strip())
        self.reason = reason
        self.exit_code = exit_code
        self.traceback = traceback


class ResourceLost(OobleckError):
    """Something outside of our control went away."""


class NodeUnreachable(ResourceLost):
    """A node that cannot be reached, or whose environment does not fit ours."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


class FaultyNode(NodeUnreachable):
    """A node that was reached and found faulty."""


class AgentGone(NodeUnreachable):
    """A node that can be reached, but whose agent does not live any more."""


class WorkersUnavailable(ResourceLost):
    """A node on which no worker process can be started."""


class Unrecoverable(ResourceLost):
    """Some layers have no living copy, so the state of the model is lost."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        listed = ", ".join(map(str, layers))
        super().__init__(f"no living node holds layer{'s' if len(layers) != 1 else ''} {listed}")
        self.layers = layers


class CorruptCheckpoint(ResourceLost):
    """Saved bytes that are missing, cut off or changed; the message names the file."""


class BadStep(OobleckError):
    """The loss of a script's step is not finite, or jumps; all ranks raise this alike, and none has saved the step."""


class StatesLost(CorruptCheckpoint):
    """A script has saved states, and none is whole and can be read any more: starting it again does not help."""


class ShardUnreadable(ResourceLost):
    """A shard of the data that cannot be read; others may be."""

    def __init__(self, problem: str, *, shard: int = 0, position: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.shard = shard
        self.position = position

    def of(self, shard: int, position: int) -> ShardUnreadable:
        """Return the same problem at a position of a shard."""
        return ShardUnreadable(self.problem, shard=shard, position=position)


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors of an exception group, nested ones included, or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves_of(each)]


def shown(value: object) -> str:
    """Return a value as text for an error message, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


class ExitCode(IntEnum):
    """The exit statuses; 64 to 78 are named as in BSD's sysexits, 130 and 143 as a shell counts signals."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    DIFFERENT = 3
    NOT_SAVED = 74
    RESUMABLE = 75
    CONFIG = 78
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODES_TEXT = """\b
Exit codes:
  0         done
  1         the job failed, or the answer could not be written
  2         wrong usage
  3         `oobleck verify` has found a difference
  74        ended as it should, but its last save failed
  75        stopped, and can be resumed
  78        a file or a plan that cannot be used
  130, 143  ended by Ctrl-C or SIGTERM"""


def exit_code_of(error: OobleckError) -> ExitCode:
    """Return the exit status of a command that ends with this error."""
    if isinstance(error, ConfigError):
        return ExitCode.CONFIG
    return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED
