"""`oobleck report`: writes one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oobleck.control.journal import Diagnosis, HistoryAccount, JournalEntry, RunAccount, StepDone, StepsSaved
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import find_journal, read_journal
from oobleck.ui.pictures import report_html

from .common_options import BaseDirOption, base_dir_of, one_run
from .events import RunArgument, RunTagOption
from .pictures import write_output


class RunReport:
    """The page about a run, from the entries of its journal as they come."""

    def __init__(self, journal: Path) -> None:
        """`journal` is the file in the run's directory; the entries are the caller's to read."""
        self._run = RunDirectory(base_dir=journal.parent.parent, tag=journal.parent.name)
        self._history, self._account, self._diagnosis = HistoryAccount(), RunAccount(), Diagnosis()
        self._loss: tuple[float, ...] = ()  # the page shows that of the newest step alone

    def apply(self, entry: JournalEntry) -> None:
        self._history.apply(entry)
        self._account.apply(entry)
        self._diagnosis.apply(entry)
        if isinstance(entry, StepDone):
            self._loss = (entry.record.loss,)
        elif isinstance(entry, StepsSaved) and entry.loss is not None:
            self._loss = (entry.loss,)

    def page(self) -> str:
        """Return the page as HTML."""
        master = self._run.master
        # Of a master on another machine, with which this one shares the directory, nothing is known.
        has_master = master is None or master.lives or not master.is_of_this_boot
        return report_html(
            self._history.history(),
            self._account.summary(self._loss),
            self._diagnosis.incidents,
            has_master=has_master,
        )


def report(
    run: RunArgument = None,
    *,
    tag: RunTagOption = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="File to write; by default, next to the journal."),
    ] = None,
    base_dir: BaseDirOption = None,
) -> None:
    """Write one self-contained HTML page about a run, active or finished.

    It shows throughput and nodes over time, the loss, where the time went, every failure with its cause and cost, and
    the plan of each generation.
    """
    journal = find_journal(base_dir_of(base_dir), one_run(run, tag))
    written = RunReport(journal)
    for entry in read_journal(journal):  # only once, as it may be gigabytes
        written.apply(entry)
    target = output if output is not None else journal.with_name("report.html")
    write_output(target, written.page(), "--output")
    typer.echo(str(target))
