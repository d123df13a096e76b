"""`oobleck list`, `attach`, `resume`, `rm`, `clean`: the runs of a base directory, active or not."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from oobleck.errors import ExitCode, UsageError
from oobleck.runtime import control_client
from oobleck.runtime.files import BASE_DIR_VARIABLE, RunDirectory, end_here, remove_states
from oobleck.runtime.journals import has_end
from oobleck.runtime.python_process import module_command
from oobleck.ui.formatting import bytes_text, duration_text

from .common_options import BaseDirOption, JsonOption, base_dir_of, complete_tags, without_resume
from .inputs import duration_s

_TAIL_BYTES = 1 << 18
_ENDS = {
    ExitCode.DONE: "done",
    ExitCode.INTERRUPTED: "stopped",
    ExitCode.TERMINATED: "stopped",
    ExitCode.RESUMABLE: "can be resumed",
}
_MAY_LIVE_S = 600.0
"""How long nodes train on without a master by default."""

Tags = Annotated[
    list[str], typer.Argument(metavar="TAG...", help="Tags of runs.", show_default=False, autocompletion=complete_tags)
]
Tag = Annotated[
    str, typer.Argument(metavar="TAG", help="Tag of the run.", show_default=False, autocompletion=complete_tags)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run as `oobleck list` shows it."""

    tag: str
    state: str
    """active, no master, done, stopped, can be resumed, failed; or empty, if it has left no journal."""
    step: int | None
    max_steps: int | None
    idle_s: float
    """Since the journal was last written."""
    size_bytes: int
    """What its directory takes on this machine's disk."""


def list_runs(*, as_json: JsonOption = False, base_dir: BaseDirOption = None) -> None:
    """Show all runs, newest first: what became of them, how far they are, and the disk space that they take here."""
    rows = rows_of(base_dir_of(base_dir))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in ("run", "state", "step", "last entry", "disk"):
        table.add_column(header, justify="right" if header in ("step", "last entry", "disk") else "left", no_wrap=True)
    for row in rows:
        step = "–" if row.step is None else f"{row.step}" if row.max_steps is None else f"{row.step}/{row.max_steps}"
        ago = f"{duration_text(row.idle_s)} ago"
        table.add_row(row.tag, row.state, step, ago, bytes_text(row.size_bytes))
    Console().print(table if rows else f"no runs in {base_dir_of(base_dir)}")


def attach(tag: Tag, *, base_dir: BaseDirOption = None) -> None:
    """Follow a run until it ends: the dashboard on a terminal, lines elsewhere. Ctrl-C leaves; the run goes on."""
    from .control import find_active
    from .following import watch

    watch(find_active(tag, base_dir))


def resume(tag: Tag, *, base_dir: BaseDirOption = None) -> None:
    """Give the command again that started a run: it continues, or is taken over from a master that has died."""
    run = _existing(base_dir_of(base_dir), tag)
    if run in control_client.active_runs(run.base_dir):
        raise UsageError(f"run {tag} is active; `oobleck attach {tag}` shows it")
    try:
        _, directory, _, *words = shlex.split(run.command)  # cd DIRECTORY && …
    except ValueError as error:
        why = "is not noted as a whole; give it again"
        raise UsageError(f"run {tag}: the command that started it {why} ({run.path / 'command'})") from error
    if "--until-eof" in words:
        raise UsageError(f"run {tag} was started by a program, which has to start it again")
    if any("…" in word for word in words):
        raise UsageError(f"run {tag}: its command is noted without what may be secret; give it in full: {run.command}")
    if not has_end(run.journal) or _has_saved(run.journal):
        words = without_resume(words)
    typer.echo(f"oobleck: cd {shlex.quote(directory)} && {shlex.join(words)}", err=True)
    os.chdir(directory)
    os.environ[BASE_DIR_VARIABLE] = str(run.base_dir)
    command = module_command(*words)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606  the user's own words


def rm(
    tags: Tags,
    *,
    force: Annotated[bool, typer.Option("--force", help="Remove runs too whose nodes may still train.")] = False,
    base_dir: BaseDirOption = None,
) -> None:
    """Remove runs with all that they have left here: journals, logs, checkpoints, processes. Nodes keep theirs."""
    directory = base_dir_of(base_dir)
    runs = [_existing(directory, tag) for tag in dict.fromkeys(tags)]
    for run in runs:
        _remove(run, force=force)


def clean(
    *,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Ended at least so long ago.",
            parser=duration_s,
            show_default="7d",
        ),
    ] = 7 * 86_400.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them, and not only show them.")] = False,
    base_dir: BaseDirOption = None,
) -> None:
    """Show runs that ended long ago, or with --yes remove them as `rm` does."""
    directory = base_dir_of(base_dir)
    old = [row for row in rows_of(directory) if row.state not in ("active", "no master") and row.idle_s >= older_than]
    for row in old:
        if yes:
            _remove(RunDirectory(base_dir=directory, tag=row.tag), force=False)
        else:
            typer.echo(f"{row.tag}: {row.state or 'no journal'}, {duration_text(row.idle_s)} ago")
    total = bytes_text(sum(row.size_bytes for row in old))
    left = "removed" if yes else "in all; --yes removes them"
    number = "1 run" if len(old) == 1 else f"{len(old)} runs"
    typer.echo(f"{number}, {total} {left}" if old else "no run ended that long ago")


def rows_of(base_dir: Path) -> list[RunRow]:
    """Return the runs of a directory, newest first."""
    if not base_dir.is_dir():
        return []
    active = {run.tag for run in control_client.active_runs(base_dir)}
    runs = [RunDirectory(base_dir=base_dir, tag=lock.parent.name) for lock in base_dir.glob("*/lock")]
    return sorted((_row(run, is_active=run.tag in active) for run in runs), key=lambda row: row.idle_s)


def _row(run: RunDirectory, *, is_active: bool) -> RunRow:
    step = max_steps = None
    state = "failed"
    newest_s = (run.path / "lock").stat().st_mtime
    try:
        newest_s = run.journal.stat().st_mtime
        with run.journal.open("rb") as file:
            max_steps = json.loads(file.readline()).get("job", {}).get("max_steps")
            file.seek(max(0, run.journal.stat().st_size - _TAIL_BYTES))
            # The first line may be cut; journals of other versions are no reason to show nothing.
            for line in file.read().split(b"\n")[-1:0:-1]:
                if step is None and line.startswith(b'{"@type":"StepDone"'):
                    step = json.loads(line)["record"]["step"]
                if step is None and line.startswith(b'{"@type":"StepsSaved"'):
                    step = json.loads(line)["step"]
                if line.startswith(b'{"@type":"JobEnded"'):
                    end = json.loads(line)
                    was_asked = end["exit_code"] == ExitCode.DONE and end["reason"].startswith("stopped")
                    state = "stopped" if was_asked else _ENDS.get(end["exit_code"], "failed")
    except (OSError, ValueError, LookupError):
        pass
    if not has_end(run.journal):
        state = "no master" if run.journal.exists() else ""
    return RunRow(
        tag=run.tag,
        state="active" if is_active else state,
        step=step,
        max_steps=max_steps,
        idle_s=max(0.0, time.time() - newest_s),
        size_bytes=_size(run.path),
    )


def _size(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:  # it was just removed
                continue
    return total


def _has_saved(journal: Path) -> bool:
    try:
        with journal.open("rb") as file:
            return any(line.startswith(b'{"@type":"CheckpointSaved"') for line in file)
    except OSError:
        return False


def _existing(base_dir: Path, tag: str) -> RunDirectory:
    run = RunDirectory(base_dir=base_dir, tag=tag)
    if "/" in tag or not (run.path / "lock").is_file():
        known = ", ".join(sorted(lock.parent.name for lock in base_dir.glob("*/lock"))) or "none"
        raise UsageError(f"no run {tag!r}; runs in {base_dir}: {known}")
    return run


def _remove(run: RunDirectory, *, force: bool) -> None:
    with run.lock(is_master=False):
        journal = run.journal
        is_young = journal.exists() and time.time() - journal.stat().st_mtime < _MAY_LIVE_S
        if is_young and not has_end(journal) and not force:
            raise UsageError(
                f"run {run.tag} has lost its master, and its nodes may still train: `oobleck resume {run.tag}` takes "
                "it over; --force removes it all the same"
            )
        size, run_id = _size(run.path), run.run_id
        end_here(run_id, run.pin_temporary_directory())
        # Renamed first: no command finds half a run, and a new one of the tag begins in a directory of its own.
        aside = run.path.with_name(f".removed-{run.tag}-{os.getpid()}")
        try:
            if run.path.is_symlink():
                raise OSError(f"{run.path} is a link")
            run.path.rename(aside)
            shutil.rmtree(aside)
        except OSError as error:
            raise UsageError(f"run {run.tag} cannot be removed as a whole: {error}") from error
        remove_states(run_id)
    typer.echo(f"removed {run.tag}: {bytes_text(size)}")
