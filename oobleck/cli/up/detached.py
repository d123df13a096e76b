"""`oobleck up --detach`: the same command again, in a session of its own, with its output in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import typer

from oobleck.errors import ConfigError
from oobleck.runtime.files import ProcessId, RunDirectory
from oobleck.runtime.python_process import module_command

_POLL_S = 0.1
_OUTPUT = "output.log"
_UNTIL_THEN = ".detached-"
# The words stay as they are: whether a `-d` among them is the option, only their parser knows (`-df 1`, `--tag -d`).
_IS_DETACHED = "OOBLECK_IS_DETACHED"


def is_detached() -> bool:
    """Return whether `start_detached` has started this process; ask once, before anything inherits the environment."""
    return os.environ.pop(_IS_DETACHED, None) is not None


def start_detached(base_dir: Path) -> int:
    """Start this command without its terminal, and wait until its job is accepted; return the exit code."""
    log = base_dir / f"{_UNTIL_THEN}{os.getpid()}.log"
    try:
        base_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = os.open(log, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(f"{log}: {error.strerror}") from error
    process = subprocess.Popen(
        module_command("oobleck", *sys.argv[1:]),
        env={**os.environ, _IS_DETACHED: "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    mine = ProcessId.of(process.pid)
    while process.poll() is None:
        held = next((run for run in _runs(base_dir) if mine is not None and run.master == mine), None)
        if held is not None and not log.exists():
            typer.echo(
                f"run {held.tag} goes on as process {process.pid}: `oobleck attach {held.tag}` shows it, "
                f"`oobleck stop {held.tag}` ends it; its output is in {held.path / _OUTPUT}"
            )
            process.returncode = 0  # else this object would warn that the process still runs
            return 0
        time.sleep(_POLL_S)
    # It has ended before it had a run, or at once: its words say why.
    with open(output, errors="replace") as said:
        said.seek(0)
        typer.echo(said.read().rstrip("\n"), err=True)
    log.unlink(missing_ok=True)
    return process.returncode


def take_output(run: RunDirectory) -> None:
    """Move this process's output into the run's directory, if it was started detached; it keeps writing to it.

    The process does that itself: the one that has started it may have been killed.
    """
    with suppress(OSError):
        log = Path(os.readlink("/proc/self/fd/1"))
        if log.name.startswith(_UNTIL_THEN) and log.parent == run.base_dir.resolve():
            log.rename(run.path / _OUTPUT)


def _runs(base_dir: Path) -> list[RunDirectory]:
    return [RunDirectory(base_dir=base_dir, tag=lock.parent.name) for lock in base_dir.glob("*/lock")]
