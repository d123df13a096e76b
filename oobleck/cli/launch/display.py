"""A run in a notebook: the dashboard as HTML, in an area of a cell that follows its changes.

IPython is never imported here: where it runs, it is loaded already.
"""

from __future__ import annotations

import io
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from oobleck.control.journal import RunSnapshot, Summary
from oobleck.errors import OobleckError

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH, _HEIGHT = 110, 30
_INTERVAL_S = 0.5
_FORMAT = '<pre style="font-family: monospace; line-height: 1.2; white-space: pre; overflow-x: auto">{code}</pre>'


class _Shown(Protocol):
    def __repr__(self) -> str: ...


class Display:
    """Shows an object in the running cell, and again twice a second; does nothing outside a notebook."""

    def __init__(self, shown: _Shown, *, changes: bool) -> None:
        """An object that has reached its end, without `changes`, is not shown."""
        self._shown = shown
        self._changes = changes
        self._handle: Any = None
        self._due_s = 0.0

    def __enter__(self) -> Display:
        if self._changes and _is_in_a_notebook():
            self._handle = sys.modules["IPython"].display.display(self._shown, display_id=True)
            self._due_s = time.monotonic() + _INTERVAL_S
        return self

    def __exit__(self, *error: object) -> None:
        self._draw()

    def update(self) -> None:
        """Show the object as it is now, at most twice a second."""
        if time.monotonic() >= self._due_s:
            self._draw()
            self._due_s = time.monotonic() + _INTERVAL_S

    def _draw(self) -> None:
        if self._handle is not None:
            with suppress(OobleckError):  # the run has just ended; it is drawn once more after that
                self._handle.update(self._shown)


def _is_in_a_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # A kernel's cells can change what they show; IPython in a terminal cannot.
    return shell is not None and hasattr(shell, "kernel")


def show_values_as_tables() -> None:
    """Have a notebook show summaries and states of runs as `oobleck up` and `status` do, and not as Python values."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and (shell := ipython.get_ipython()) is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        formatter.for_type(RunSnapshot, snapshot_html)
        formatter.for_type(Summary, summary_html)


def snapshot_html(snapshot: RunSnapshot) -> str:
    from oobleck.ui.dashboard import Dashboard

    return _html(Dashboard(snapshot, fill=False))


def summary_html(summary: Summary) -> str:
    from oobleck.ui.summary_table import summary_table

    return _html(summary_table(summary))


def _html(drawn: RenderableType) -> str:
    from rich.console import Console

    console = Console(
        record=True, file=io.StringIO(), width=_WIDTH, height=_HEIGHT, force_terminal=True, force_jupyter=False
    )
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format=_FORMAT)
