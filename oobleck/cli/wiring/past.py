"""Finds what a previous master has left: agents, and a journal, which takes seconds to read however long its run is.

Makes a run's master, which goes on from there if there is anything.

Reading starts from the journal's image (`runtime/journals/journal_image.py`), which is renewed as the journal grows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import trio

from oobleck.control.journal import JobStarted, NodeAdded, ScriptStarted
from oobleck.control.nodes import Membership
from oobleck.control.replay import BooksImage, RunBooks
from oobleck.control.scripts import ReplayedRanks
from oobleck.control.training import ReplayedRun
from oobleck.errors import ConfigError, OobleckError, UsageError
from oobleck.job import JobSpec, NodeSpec
from oobleck.job.ranks import RanksSpec
from oobleck.job.secrets import Hiding
from oobleck.roles.master import Master, RunClock
from oobleck.roles.master_ports import Decisions, LiveCluster
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import JournalWriter, has_end, read_entries, read_image, read_journal, write_image
from oobleck.runtime.launchers import Launcher
from oobleck.runtime.patient_clock import PatientClock
from oobleck.runtime.profile_files import ProfileFiles

_log = logging.getLogger("oobleck.up")

_PERIOD_S = 10.0
# A new image is due once the journal has grown by this much (15,000 steps, less than a second of reading), and by this
# many times the image's own size, so that images stay a small part of what a run writes.
LEAST_BYTES = 4 << 20
TIMES_AS_LONG = 4
_END_S = 20.0
_FIRST_ASKED = 8  # nodes; the next batches are four times as large each


def read_past(path: Path) -> tuple[RunBooks, int]:
    """Read a journal and renew its image; return the books, empty if they cannot be continued, and their place."""
    if not path.exists():
        return RunBooks(), 0
    try:
        books, place, grown = read_books(path)
    except ConfigError as error:
        _log.warning("nothing can be taken over: %s", error)  # as after another version of ours
        return RunBooks(), 0
    if grown >= LEAST_BYTES:
        try:
            _write(path, books, place)
        except OSError as error:
            _log.warning("no image of %s is made: %s", path, error)
    return books, place


def read_books(path: Path) -> tuple[RunBooks, int, int]:
    """Return a journal's books, the place where they end, and the bytes after its image. Raises ConfigError."""
    known = read_image(path, BooksImage)
    books, start = RunBooks(), 0
    if known is not None:
        try:
            books, start = RunBooks.of_image(known[0]), known[1]
        except OobleckError as error:
            _log.warning("the image of %s is not used: %s; the whole journal is read", path, error)
    place = start
    # Plans after the image are written as changes of the newest one in it.
    for end, entry in read_entries(path, start=start, base=books.newest):
        books.apply(entry)
        place = end
    return books, place, place - start


def advance_image(path: Path) -> tuple[int, int]:
    """Renew a journal's image; return the place that it stands for, and its size. Raises OSError and ConfigError."""
    # This reads the file and not the master's memory, to test exactly what a later master will read.
    books, place, _ = read_books(path)
    return place, _write(path, books, place)


def _write(path: Path, books: RunBooks, place: int) -> int:
    image = books.image()
    return 0 if image is None else write_image(path, image, place)


async def keep_image(
    path: Path,
    size_bytes: Callable[[], int],
    *,
    place: int,
    period_s: float = _PERIOD_S,
    least_bytes: int = LEAST_BYTES,
) -> None:
    """Renew a growing journal's image until cancelled; it stands for `place` of the `size_bytes()` bytes now."""
    # A failure here must not end the run: without an image, a later master only reads more of the journal.
    due = place + least_bytes
    while True:
        await trio.sleep(period_s)
        if size_bytes() < due:
            continue
        try:
            place, size = await trio.to_thread.run_sync(advance_image, path, abandon_on_cancel=True)
            due = place + max(least_bytes, TIMES_AS_LONG * size)
        except (OSError, OobleckError, LookupError) as error:
            _log.warning("no image of %s is made: %s", path, error)
            due = size_bytes() + least_bytes


def make_master(
    coordinator: Decisions,
    job: JobSpec | RanksSpec,
    *,
    directory: RunDirectory,
    cluster: LiveCluster,
    journal: JournalWriter,
    clock: PatientClock,
    hide: Hiding,
    replayed: ReplayedRun | ReplayedRanks | None,
) -> Master:
    """Make the master of a run that begins, or that another master has left, as `replayed` from its journal."""
    past_s = 0.0
    if replayed is not None:
        # The wall clock may have been set back, but a run's time never goes backwards.
        began = datetime.fromisoformat(replayed.started.started_at)
        past_s = max(replayed.last_s, (datetime.now(UTC) - began).total_seconds())
    return Master(
        coordinator,
        job,
        cluster=cluster,
        journal=journal,
        profiles=ProfileFiles(directory.profile),
        clock=RunClock(elapsed_s=past_s, held_up_s=lambda: clock.held_up_s),
        hide=hide,
        known=[] if replayed is None else [member.spec for member in replayed.members.all],
    )


async def refuse_to_end(cluster: LiveCluster, launcher: Launcher, left: Membership | None, tag: str, kind: str) -> None:
    """Raise UsageError if nodes of a run of the other `kind` of command, `left` without a master, still live."""
    if left is None:
        return
    left.relocate({spec.name: spec for spec in launcher.nodes})
    if await is_any_alive(cluster, launcher, [member.spec for member in left.living]):
        raise UsageError(
            f"the run {tag}, which `oobleck {kind}` has started, continues without its master; choose another --tag, "
            f"or take it over (`oobleck resume {tag}`, or the same command) and end it (`oobleck stop {tag}`)"
        )


async def is_any_alive(cluster: LiveCluster, launcher: Launcher, nodes: Sequence[NodeSpec]) -> bool:
    """Whether the agent of one of these nodes lives."""
    # If thousands live, the first few answer at once, so more are asked only while none answers.
    asked: set[str] = set()
    number = _FIRST_ASKED
    while found := (await launcher.found_again(nodes, asked))[:number]:
        if await _lives_one(cluster, found):
            return True
        asked.update(spec.name for spec in found)
        number *= 4
    return False


async def _lives_one(cluster: LiveCluster, nodes: Sequence[NodeSpec]) -> bool:
    async with trio.open_nursery() as asking:
        living: list[NodeSpec] = []

        async def ask(spec: NodeSpec) -> None:
            if await cluster.is_alive(spec):
                living.append(spec)
                asking.cancel_scope.cancel()

        for spec in nodes:
            asking.start_soon(ask, spec)
    return bool(living)


async def end_left(
    cluster: LiveCluster, launcher: Launcher, journal: Path, known: Sequence[NodeSpec]
) -> tuple[NodeSpec, ...]:
    """End what a run without a master has left on nodes that are not `known`, as far as possible; return them."""
    # Known nodes are cleaned up when their agents start.
    names = {spec.name for spec in known}
    now = {spec.name: spec for spec in launcher.nodes}
    left = [now.get(spec.name, spec) for spec in _nodes_of(journal) if spec.name not in names]
    if launcher.are_virtual:  # all of them are this machine, so any one can clean up
        left = [replace(known[0], name=spec.name) for spec in left]
    with trio.move_on_after(_END_S):
        async with trio.open_nursery() as ending:
            for spec in left:
                ending.start_soon(cluster.clean, spec)
    return tuple(left)


def _nodes_of(journal: Path) -> tuple[NodeSpec, ...]:
    """Return the nodes of a run that has not ended, lost ones included: they may only have been cut off."""
    specs: dict[str, NodeSpec] = {}
    if not journal.exists() or has_end(journal):
        return ()
    with suppress(ConfigError):  # another version's, or damaged from here on
        for entry in read_journal(journal):
            match entry:
                case JobStarted(nodes=nodes) | ScriptStarted(nodes=nodes):
                    specs |= {spec.name: spec for spec in nodes}
                case NodeAdded(node=spec):
                    specs[spec.name] = spec
    return tuple(specs.values())
