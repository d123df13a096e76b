"""Scripts in processes that are forked from one that has imported torch, which takes a script of its own seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["ROOT", "started"]

ROOT = Path(__file__).parents[1]

_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(
    ["torch.distributed.pipelining", "oobleck.checkpoint", "oobleck.cli.main", "oobleck.training.process.worker"]
)


def started(
    script: Path | str,
    words: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    search_path: Sequence[str] = (),
    output: Path,
    errors: Path,
) -> BaseProcess:
    """Start a script as `python script words…` would, or code as `python -c` would.

    What it prints is in files, which may be one.
    """
    given = (script, tuple(words), dict(environment), tuple(search_path), (output, errors))
    process = _WARM.Process(target=_run, args=given)
    process.start()
    return process


def _run(
    script: Path | str,
    words: Sequence[str],
    environment: Mapping[str, str],
    search_path: Sequence[str],
    files: Sequence[Path],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.argv = ["-c" if isinstance(script, str) else str(script), *words]
    own = "" if isinstance(script, str) else str(script.parent)
    sys.path[:] = [own, *search_path, *(each for each in sys.path if each not in ("", str(ROOT), own))]
    try:
        if isinstance(script, str):
            main = sys.modules["__main__"] = types.ModuleType("__main__")  # without the name of a file
            exec(compile(script, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # forked processes leave that out
