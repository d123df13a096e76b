"""`oobleck up --detach`: the same command again, in a session of its own, with its output in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import typer

from oobleck.errors import ConfigError
from oobleck.runtime.files import ProcessId, RunDirectory
from oobleck.runtime.python_process import module_command

_POLL_S = 0.1
_OUTPUT = "output.log"


def start_detached(base_dir: Path) -> int:
    """Start this command without its terminal, and wait until its job is accepted; return the exit code."""
    words = [word for word in _own_words(sys.argv[1:]) if word not in ("-d", "--detach")]
    words += ["--plain"] if "--plain" not in words else []
    split = sys.argv[1:].index("--") if "--" in sys.argv[1:] else len(sys.argv)
    log = base_dir / f".detached-{os.getpid()}.log"
    try:
        base_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(f"{log}: {error.strerror}") from error
    process = subprocess.Popen(
        module_command("oobleck", *words, *sys.argv[1:][split:]),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    os.close(output)
    mine = ProcessId.of(process.pid)
    while process.poll() is None:
        held = next((run for run in _runs(base_dir) if mine is not None and run.master == mine), None)
        if held is not None:
            log.rename(held.path / _OUTPUT)
            typer.echo(
                f"run {held.tag} goes on as process {process.pid}: `oobleck attach {held.tag}` shows it, "
                f"`oobleck stop {held.tag}` ends it; its output is in {held.path / _OUTPUT}"
            )
            process.returncode = 0  # else this object would warn that the process still runs
            return 0
        time.sleep(_POLL_S)
    # It has ended before it had a run: its words say why.
    typer.echo(log.read_text(errors="replace").rstrip("\n"), err=True)
    log.unlink()
    return process.returncode


def _own_words(words: list[str]) -> list[str]:
    """Return the words before a script's arguments."""
    return words[: words.index("--")] if "--" in words else words


def _runs(base_dir: Path) -> list[RunDirectory]:
    return [RunDirectory(base_dir=base_dir, tag=lock.parent.name) for lock in base_dir.glob("*/lock")]
