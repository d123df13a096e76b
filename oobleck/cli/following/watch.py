"""`oobleck attach` and `oobleck status --watch`: a run on this terminal, as the process that started it shows it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial

import trio
import typer

from oobleck.cli.control import request_of
from oobleck.control.journal import RunSnapshot
from oobleck.host.streams import Output, as_output
from oobleck.runtime import control_client
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import follow_journal
from oobleck.ui.live import LineFormatter, console_on, run_dashboard, wants_dashboard
from oobleck.ui.terminal import KeyReader
from oobleck.wire import from_builtins

_WATCH_INTERVAL_S = 0.5


def watch(run: RunDirectory) -> None:
    """Show a run until its end or an interrupt: its dashboard on a terminal, its lines elsewhere."""
    output = as_output(sys.stdout)
    if wants_dashboard(console_on(output)):
        try:
            trio.run(_draw, run, output)
        except KeyboardInterrupt:
            return
    else:
        formatter = LineFormatter()
        for entry in follow_journal(run.journal):
            for line in formatter.apply(entry) if entry is not None else ():
                typer.echo(line)


async def _draw(run: RunDirectory, output: Output) -> None:
    async def ask(wanted: control_client.ControlRequest) -> dict[str, object]:
        request = partial(control_client.request, run.control_socket, wanted)
        return await trio.to_thread.run_sync(request, abandon_on_cancel=True)

    async def snapshot() -> RunSnapshot:
        return from_builtins(RunSnapshot, await ask(control_client.StatusRequest()))

    newest = await snapshot()

    async def follow(scope: trio.CancelScope) -> None:
        nonlocal newest
        with suppress(control_client.NoActiveRun):
            while newest.exit_code is None:
                await trio.sleep(_WATCH_INTERVAL_S)
                newest = await snapshot()
        await trio.sleep(_WATCH_INTERVAL_S)
        scope.cancel()  # it has no master any more

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, nursery.cancel_scope)
        keys = KeyReader(0) if os.isatty(0) else None
        await run_dashboard(lambda: newest, output=output, act=lambda wish: ask(request_of(wish)), keys=keys)
        nursery.cancel_scope.cancel()
