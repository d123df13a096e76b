"""Profiles a job's model on this machine without loading torch into this process."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import ConfigError, ResourceLost
from oobleck.job import JobSpec
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import encode_json


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    key: str
    """Under which runs look for it."""
    profile_json: str
    was_cached: bool


def run_profiler(job: JobSpec, *, cache_dir: Path, profile_dir: Path, num_workers: int, fresh: bool) -> MeasuredProfile:
    """Have a child process measure the layers, unless `profile_dir` has what it would find and `fresh` is false.

    `num_workers` is how many workers are to share this machine. Takes as long as the data and the measurement do.
    Raises ConfigError for a job that cannot be, ResourceLost when the process fails.
    """
    freshness = "fresh" if fresh else "cached"
    command = module_command("oobleck.training.process.profile_job", str(cache_dir), str(profile_dir))
    done = subprocess.run(
        [*command, str(num_workers), freshness],
        input=encode_json(job),
        capture_output=True,
        check=False,
        env=as_no_rank(),
    )
    if done.returncode:
        last_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode == 78:
            raise ConfigError(last_line)
        raise ResourceLost(f"the profile could not be measured: {last_line}")
    answer = json.loads(done.stdout)
    return MeasuredProfile(key=answer["key"], profile_json=answer["profile"], was_cached=answer["was_cached"])
