"""Shell commands that a user has written, such as questions to a cloud; what they mean is for the callers to know.

A command that is given up is killed together with the processes that it has started.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from oobleck.host.process_group import signal_group

_REAPED_WITHIN_S = 1.0  # a killed process that waits for a lost disk ends once that answers


@asynccontextmanager
async def shell_command(command: str, *, errors: int = subprocess.DEVNULL) -> AsyncIterator[trio.Process]:
    """Run a command, whose output is the process's `stdout`, while the context lasts; `errors` is for its stderr.

    If the context ends by an exception, such as a cancellation, the command and its children are killed. Raises
    OSError if no process can be made.
    """
    process = await trio.lowlevel.open_process(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,  # a process group that can be killed as a whole
    )
    try:
        yield process
    except BaseException:
        signal_group(process.pid)  # the shell may have ended before its children
        raise
    finally:
        with trio.move_on_after(_REAPED_WITHIN_S, shield=True):  # so that no zombie is left
            await process.wait()
        for stream in filter(None, (process.stdout, process.stderr)):
            await trio.aclose_forcefully(stream)
