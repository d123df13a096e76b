"""What the exit status of every command means."""

from __future__ import annotations

from enum import IntEnum

from oobleck.errors import ConfigError, OobleckError, UsageError


class ExitCode(IntEnum):
    """The exit statuses; 64 to 78 are named as in BSD's sysexits, 130 and 143 as a shell names signals."""

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
    """The exit status that an error of ours ends a command with."""
    match error:
        case ConfigError():
            return ExitCode.CONFIG
        case UsageError():
            return ExitCode.USAGE
        case _:
            return ExitCode.FAILED
