"""`oobleck ui`: the report of a run as a page in a browser, which follows the run."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from oobleck.cli.common_options import BaseDirOption, base_dir_of, one_run
from oobleck.cli.events import RunArgument, RunTagOption
from oobleck.cli.inputs import whole
from oobleck.cli.report import RunReport
from oobleck.control.journal import PlanAdopted
from oobleck.runtime.journals import find_journal, read_entries
from oobleck.runtime.page_server import PageServer
from oobleck.ui.pictures import LIVE_HEADERS, live_page


class _FollowedReport:
    """The report of a journal as far as it is written, for several threads."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._begin(inode=0)

    def _begin(self, *, inode: int) -> None:
        self._inode, self._place = inode, 0
        self._plan: PlanAdopted | None = None
        self._report = RunReport(self._journal)

    def page(self) -> str:
        """Read what is new, and return the page. Raises ConfigError for a broken journal."""
        with self._lock:
            with suppress(FileNotFoundError):  # a new run of this tag has set it aside, and not yet begun its own
                self._read()
            return live_page(self._report.page())

    def _read(self) -> None:
        inode = self._journal.stat().st_ino
        if inode != self._inode:
            self._begin(inode=inode)
        for place, entry in read_entries(self._journal, start=self._place, base=self._plan):
            self._report.apply(entry)
            self._place = place
            if isinstance(entry, PlanAdopted):
                self._plan = entry


def ui(
    run: RunArgument = None,
    *,
    tag: RunTagOption = None,
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", help="Port on 127.0.0.1.", parser=whole(0, 65_535), show_default="a free one"
        ),
    ] = 0,
    base_dir: BaseDirOption = None,
) -> None:
    """Show the report of a run in a browser of this machine, and keep it up to date. Ctrl-C ends the page, not the run.

    The page changes nothing. Its address has a random token, so other users of this machine cannot open it.
    """
    followed = _FollowedReport(find_journal(base_dir_of(base_dir), one_run(run, tag)))
    followed.page()  # a long journal is read before anyone waits for it, and a broken one is an error here
    with PageServer(followed.page, port=port, headers=LIVE_HEADERS) as server:
        typer.echo(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
