"""Where a job comes from: the default, a file, a script, or both, and `--set` on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oobleck.job import JobSpec
from oobleck.runtime.files import read_input

from .job_file import apply_overrides, default_job, load_job, parse_override

__all__ = ["read_job"]


def read_job(
    file: Path | None, script: Path | None, arguments: tuple[str, ...], settings: Sequence[str], *, num_nodes: int
) -> JobSpec:
    """Read a job; what its script says counts for more than its file. A script takes as long as what it imports."""
    if file is None and script is None:
        job = default_job(num_nodes)
    else:
        job = JobSpec() if file is None else load_job(read_input(file, "job file"), source=str(file))
    if script is not None:
        from oobleck.runtime.processes import describe_script

        described = describe_script(script, arguments)
        job = load_job(described.settings, source=f"{script}, what job() returns", base=job, has_lines=False)
        job = replace(job, script=described.spec)
    return apply_overrides(job, [parse_override(text) for text in settings])
