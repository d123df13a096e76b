"""Notices when the directory of an active run is removed, and restores the files that its master keeps there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import trio

from oobleck.errors import UserError
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import JournalWriter
from oobleck.runtime.metrics_output import MetricsOutput

_PERIOD_S = 2.0


async def watch_run_directory(
    directory: RunDirectory,
    journal: JournalWriter,
    metrics: MetricsOutput,
    *,
    say: Callable[[str], None],
    listen: Callable[[], None],
    period_s: float = _PERIOD_S,
) -> None:
    """Watch until cancelled, and report what was gone. `listen` serves the control socket again."""
    with ExitStack() as locks:
        problem = ""
        while True:
            await trio.sleep(period_s)
            if journal.is_there:
                continue
            try:
                directory.create()
                journal.restore()
                metrics.restore()
                # The old lock is on the removed file; without a new one, another master could start.
                locks.enter_context(directory.lock())
            except (OSError, UserError) as error:
                if str(error) != problem:
                    problem = str(error)
                    say(f"the run's directory {directory.path} is gone, and cannot be made again: {problem}")
                continue
            listen()
            say(
                f"{directory.path} was removed during the run: its journal, metrics and control socket "
                "are restored; its logs are lost, and so are its checkpoints until the next save"
            )
