"""Profiles a job's model on this machine, in a process of its own: `python -m oobleck.training.process.profile_job …`.

It reads the job as a line of JSON from stdin. The arguments are the directories of tokens and of profiles, the number
of workers that share the machine, and `fresh` or `cached`. It writes the profile, its key, and whether it was cached,
to stdout as JSON; a problem of the job goes to stderr, with the exit status 78.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch

from oobleck.control.plans import profile_key
from oobleck.errors import ConfigError
from oobleck.host.machine import this_machine
from oobleck.host.streams import answer_with
from oobleck.job import JobSpec
from oobleck.planner import profile_from_json, profile_to_json
from oobleck.training.assembly import assemble
from oobleck.training.comm import choose_device, device_memory_bytes
from oobleck.training.model import require_compiler
from oobleck.wire import decode_json

from .profiler import device_name, profile_of_job


def main() -> int:
    """Print the profile of a job; returns the exit status."""
    job = decode_json((JobSpec,), sys.stdin.readline())
    cache_dir, profile_dir, workers, freshness = sys.argv[1:]
    is_fresh = freshness == "fresh"
    return answer_with(
        lambda: json.dumps(_profile(job, Path(cache_dir), Path(profile_dir), int(workers), is_fresh=is_fresh))
    )


def _profile(job: JobSpec, cache_dir: Path, profile_dir: Path, workers: int, *, is_fresh: bool) -> dict[str, object]:
    device = choose_device(job.device, 0)
    if job.compile:
        require_compiler(device)
    machine = this_machine()
    # The profile holds for a worker's share of the machine, so it is measured with no more than that.
    threads = job.torch_threads or max(1, machine.usable_cores // workers)
    memory_bytes = (
        device_memory_bytes(device, num_sharing=1, wanted_bytes=job.device_memory_bytes)
        or job.device_memory_bytes
        or machine.usable_memory_bytes // workers
    )
    torch.set_num_threads(threads)
    assembly = assemble(job, cache_dir=cache_dir)
    structure = assembly.structure
    key = profile_key(
        job,
        layer_names=structure.layer_names,
        parameters=structure.num_parameters,
        device=(device_name(device), memory_bytes, threads, machine.num_cores),
        versions=(platform.python_version(), str(torch.__version__)),
    )
    if not is_fresh and (cached := _cached(profile_dir / f"{key}.json")) is not None:
        return {"key": key, "profile": cached, "was_cached": True}
    profile = profile_of_job(assembly, device_memory_bytes=memory_bytes)
    return {"key": key, "profile": profile_to_json(profile), "was_cached": False}


def _cached(path: Path) -> str | None:
    # An unreadable file, of another version or cut short, is measured again.
    try:
        text = path.read_text(encoding="utf-8")
        profile_from_json(text, source=str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
    return text


if __name__ == "__main__":
    sys.exit(main())
