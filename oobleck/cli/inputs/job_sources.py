"""Where a job comes from: the default, a file, a script, or both, and `--set` on top."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oobleck.host.script import SCRIPT_WAITS, has_job
from oobleck.job import JobSpec
from oobleck.runtime.files import read_input

from .job_file import apply_overrides, default_job, load_job, parse_override

if TYPE_CHECKING:
    from oobleck.runtime.processes import DescribedScript, TrainerProcess


def read_job(
    file: Path | None, script: Path | None, arguments: tuple[str, ...], settings: Sequence[str], *, num_nodes: int
) -> JobSpec:
    """Read a job; what its script says counts for more than its file. A script takes as long as what it imports."""
    described = None
    if script is not None:
        from oobleck.runtime.processes import describe_script

        described = describe_script(script, arguments)
    return _read(file, script, described, settings, num_nodes=num_nodes)


def open_job(
    file: Path | None, script: Path | None, arguments: tuple[str, ...], settings: Sequence[str], *, num_nodes: int
) -> tuple[JobSpec, TrainerProcess | None]:
    """The same for a run: a script that calls `train()` is on its way then, and waits in it.

    Raises SystemExit where it exits before.
    """
    if script is not None:
        from oobleck.runtime.processes import TrainerProcess, read_script

        spec = read_script(script, arguments)
        if not has_job(spec) and SCRIPT_WAITS not in os.environ:
            process = TrainerProcess(spec)
            return _read(file, script, process.described, settings, num_nodes=num_nodes), process
    return read_job(file, script, arguments, settings, num_nodes=num_nodes), None


def _read(
    file: Path | None,
    script: Path | None,
    described: DescribedScript | None,
    settings: Sequence[str],
    *,
    num_nodes: int,
) -> JobSpec:
    if file is None and script is None:
        job = default_job(num_nodes)
    else:
        job = JobSpec() if file is None else load_job(read_input(file, "job file"), source=str(file))
    if described is not None:
        job = load_job(described.settings, source=f"{script}, its job", base=job, has_lines=False)
        job = replace(job, script=described.spec)
    return apply_overrides(job, [parse_override(text) for text in settings])
