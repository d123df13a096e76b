"""Wires a run of a script together: its coordinator, master, cluster, journal, control socket and output.

`run_job` does the same for training. There is no dashboard here: the terminal is for the script's own output.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TextIO

import trio

from oobleck.cli import wiring
from oobleck.cli.inputs import DialIn, NodeSource, VirtualOnes
from oobleck.control.events import End
from oobleck.control.protocol import RankOutput
from oobleck.control.replay import RunBooks
from oobleck.control.scripts import RanksCoordinator, ReplayedRanks
from oobleck.errors import ExitCode, UsageError, leaves_of
from oobleck.host.streams import Output, as_output, lasting
from oobleck.host.user_path import expand_user
from oobleck.job import NodeSpec
from oobleck.job.ranks import RanksSpec
from oobleck.job.secrets import Hiding
from oobleck.planner.formatting import counted
from oobleck.roles.master_ports import LiveCluster
from oobleck.runtime.descriptors import raise_descriptor_limit, require_descriptors
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import JournalWriter, set_aside
from oobleck.runtime.launchers import Launcher
from oobleck.runtime.patient_clock import PatientClock
from oobleck.runtime.workdir import Workdir
from oobleck.storage.scripts import DIRECTORY_VARIABLE, find_parts, identity_of
from oobleck.ui.live import say

_MOST_WAITING = 4096
_LOOK_S = 0.02
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRun:
    """A run that `oobleck run` has read and checked."""

    spec: RanksSpec
    source: NodeSource
    python: str | None
    ssh_config: Path | None
    base_dir: Path
    check: bool
    """Whether to check nodes first, unless they are virtual."""
    owner: str
    """The script's path here."""
    workdir: Workdir | None
    """What nodes get first; ranks' directory is in it."""
    leaves_out_slow: bool
    """Whether nodes that this check finds slow do not take part."""


def run_ranks(run: RanksRun) -> int:
    """Run the script to its end; return the exit code."""
    limit = raise_descriptor_limit()
    num_nodes = len(run.source.names)
    require_descriptors(limit, num_nodes, are_virtual=isinstance(run.source, VirtualOnes))
    directory = RunDirectory(base_dir=run.base_dir, tag=run.spec.tag)
    _check_states(run, directory)
    directory.create()
    output = lasting(sys.stderr)  # standard output is for the script's own output
    say(output, f"oobleck run: {run.spec.tag}, {counted(num_nodes, 'node')}, logs in {directory.path}")
    hide = Hiding(None, {**os.environ, **run.spec.environment})
    with directory.lock(), wiring.background_logging(hide):
        directory.note_owner(run.owner)
        clock = PatientClock()
        # A living master would still write the journal, so it is read only with the lock.
        past = wiring.read_past(directory.journal)
        try:
            end = trio.run(_run, run, directory, output, clock, hide, past, clock=clock)
        except BaseException as error:
            if not all(isinstance(leaf, wiring.MasterLeaves) for leaf in leaves_of(error)):
                raise
            say(output, "oobleck run: SIGTERM: ranks run on without this master, and the next takes over")
            return ExitCode.RESUMABLE
    if end.exit_code != ExitCode.DONE:
        wiring.complain(end.reason, style="red")
    return end.exit_code


def _check_states(run: RanksRun, directory: RunDirectory) -> None:
    """Raise UsageError for states of another script."""
    # This machine may have only some of the states; `load` checks all of them.
    inherited = {**(os.environ if isinstance(run.source, VirtualOnes) else {}), **run.spec.environment}
    named = inherited.get(DIRECTORY_VARIABLE)
    states = Path(run.spec.directory, expand_user(named)) if named else directory.path / "checkpoints"
    own = identity_of(run.spec)
    identity = own.of_environment(own.environment(inherited))
    notes = [part.note for part in find_parts(None, states)]
    for note in notes:
        identity.check_script(note, str(states))
    if notes:
        identity.check_arguments(max(notes, key=lambda note: note.age), str(states))


def _open(
    run: RanksRun, directory: RunDirectory, tell: Callable[[str], None]
) -> AbstractAsyncContextManager[wiring.RunNodes]:
    return wiring.open_nodes(
        run.source,
        directory,
        run.spec.control,
        python=run.python,
        ssh_config=run.ssh_config,
        checks=run.check,
        tell=tell,
        runs_ranks=True,
        workdir=run.workdir,
    )


async def _find_past(run: RanksRun, cluster: LiveCluster, launcher: Launcher, books: RunBooks) -> ReplayedRanks | None:
    """Return a run that continues without its master. Raises UsageError for one of another command."""
    trained = books.finish()
    await wiring.refuse_to_end(cluster, launcher, None if trained is None else trained.members, run.spec.tag, "up")
    ranks = books.ranks
    if ranks is None:
        return None
    specs = {spec.name: spec for spec in launcher.nodes}
    ranks.members.relocate(specs)
    if ranks.gap is not None or not await wiring.is_any_alive(cluster, launcher, ranks.nodes):
        return None  # where the journal does not know all that happened, the script starts again
    ours, theirs = run.spec.without_values(), ranks.started.run
    if not isinstance(run.source, VirtualOnes):  # nodes may have been listed since
        ours = replace(ours, min_nodes=theirs.min_nodes, max_nodes=theirs.max_nodes)
    if ours != theirs:
        changed = ", ".join(
            each.name for each in fields(ours) if getattr(ours, each.name) != getattr(theirs, each.name)
        )
        raise UsageError(
            f"the run {run.spec.tag} continues without its master, and this command differs from its own in {changed}; "
            f"`oobleck resume {run.spec.tag}` takes it over, and `oobleck stop {run.spec.tag}` ends it then"
        )
    return ranks


async def _run(
    run: RanksRun,
    directory: RunDirectory,
    output: Output,
    clock: PatientClock,
    hide: Hiding,
    past: tuple[RunBooks, int],
) -> End:
    spec, (books, place) = run.spec, past

    def tell(text: str) -> None:
        say(output, f"oobleck run: {text}")

    async with _open(run, directory, tell) as nodes, trio.open_nursery() as nursery:
        launcher, cluster = nodes.launcher, nodes.cluster
        replayed = await _find_past(run, cluster, launcher, books)
        # A command that is refused must not be taken for that of the run that lives here: `oobleck resume` gives it.
        directory.note_command(["oobleck", *sys.argv[1:]], run.spec.command[1:])
        is_new = replayed is None
        known, chosen, remarks = await nodes.begin(
            tell, waits=is_new, is_check_due=is_new, leaves_out_slow=run.leaves_out_slow
        )
        left: tuple[NodeSpec, ...] = ()
        if replayed is None:
            left = await wiring.end_left(cluster, launcher, directory.journal, known)
            set_aside(directory.journal)
            books, place = RunBooks(), 0
        with JournalWriter(directory.journal, tell=lambda gap: session.tell_of_gap(gap)) as journal:
            coordinator = RanksCoordinator(
                spec,
                chosen,
                started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                python_version=platform.python_version(),
                replayed=replayed,
            )
            master = wiring.make_master(
                coordinator,
                spec,
                directory=directory,
                cluster=cluster,
                journal=journal,
                clock=clock,
                hide=hide,
                replayed=replayed,
            )
            is_replaced = isinstance(run.source, DialIn) and run.source.pods is not None
            session = wiring.Session(master, cluster, launcher, nursery, kills=(), past=books, is_replaced=is_replaced)
            screen = _Screen()
            master.show_output(screen.take)
            await session.serve(directory.control_socket, remarks)
            nursery.start_soon(partial(wiring.keep_image, directory.journal, lambda: journal.size_bytes, place=place))
            async with trio.open_nursery() as watching:
                session.show(output, watching, plain=True)
                watching.start_soon(screen.run)
                end = await master.run()
                watching.cancel_scope.cancel()
            if end.exit_code in wiring.ENDS_WELL:
                await wiring.give_memory_back(cluster, [*master.nodes, *left], keeps_only_copies=True)
        nursery.cancel_scope.cancel()
    return end


class _Screen:
    """Writes the output of ranks to this command's own streams."""

    def __init__(self) -> None:
        self._waiting: deque[RankOutput] = deque(maxlen=_MOST_WAITING)

    def take(self, output: RankOutput) -> None:
        # A reader that is too slow must not hold up the run, so the oldest output gives way.
        self._waiting.append(output)

    async def run(self) -> None:
        """Write until cancelled, and then what still waits."""
        try:
            while True:
                await self._write()
                await trio.sleep(_LOOK_S)
        finally:
            # The last output may tell why the run has ended, so it is written even after a cancellation.
            with trio.CancelScope(deadline=trio.current_time() + _LAST_WORDS_S, shield=True):
                await self._write()

    async def _write(self) -> None:
        written, self._waiting = self._waiting, deque(maxlen=_MOST_WAITING)
        for is_error, stream in ((False, sys.stdout), (True, sys.stderr)):
            text = "".join(each.text for each in written if each.is_error == is_error)
            if text:
                await trio.to_thread.run_sync(_print, stream, text, abandon_on_cancel=True)


def _print(stream: TextIO, text: str) -> None:
    output = as_output(stream)
    output.write_as_read(text)
    output.flush()
