"""`oobleck attach` and `oobleck status --watch`: a run on this terminal, as the process that started it shows it."""

from __future__ import annotations

import time
from contextlib import suppress

import typer
from rich.console import Console
from rich.live import Live

from oobleck.control.journal import RunSnapshot
from oobleck.runtime import control_client
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import follow_journal
from oobleck.ui.dashboard import Dashboard
from oobleck.ui.live import LineFormatter, wants_dashboard
from oobleck.wire import from_builtins

_WATCH_INTERVAL_S = 0.5


def watch(run: RunDirectory) -> None:
    """Show a run until its end or an interrupt: its dashboard on a terminal, its lines elsewhere."""
    console = Console()
    if not wants_dashboard(console):
        formatter = LineFormatter()
        for entry in follow_journal(run.journal):
            for line in formatter.apply(entry) if entry is not None else ():
                typer.echo(line)
        return
    last: RunSnapshot | None = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live, suppress(control_client.NoActiveRun):
            while last is None or last.exit_code is None:
                answer = control_client.request(run.control_socket, control_client.StatusRequest())
                last = from_builtins(RunSnapshot, answer)
                live.update(Dashboard(last), refresh=True)
                time.sleep(_WATCH_INTERVAL_S)
    except KeyboardInterrupt:
        pass
    finally:
        if last is not None:
            console.print(Dashboard(last, fill=False))
