"""`oobleck report`: writes one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oobleck.control.journal import Diagnosis, HistoryAccount, RunAccount, StepDone, StepsSaved
from oobleck.runtime.journals import find_journal, read_journal
from oobleck.ui.pictures import report_html

from .common_options import BaseDirOption, base_dir_of, one_run
from .events import RunArgument, RunTagOption
from .pictures import write_output


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
    history, account, diagnosis = HistoryAccount(), RunAccount(), Diagnosis()
    loss: tuple[float, ...] = ()  # the page shows that of the newest step alone
    for entry in read_journal(journal):  # only once, as it may be gigabytes
        history.apply(entry)
        account.apply(entry)
        diagnosis.apply(entry)
        if isinstance(entry, StepDone):
            loss = (entry.record.loss,)
        elif isinstance(entry, StepsSaved) and entry.loss is not None:
            loss = (entry.loss,)
    page = report_html(history.history(), account.summary(loss), diagnosis.incidents)
    target = output if output is not None else journal.with_name("report.html")
    write_output(target, page, "--output")
    typer.echo(str(target))
