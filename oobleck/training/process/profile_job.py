"""Profiles a job's model on this machine, in a process of its own: `python -m oobleck.training.process.profile_job …`.

It reads the job as a line of JSON from stdin. The arguments are the directories of tokens and of profiles, the number
of workers that share the machine, and `fresh` or `cached`. It writes the profile, its key, and whether it was cached,
to stdout as JSON; a problem of the job goes to stderr, with the exit status 78.

A process for each of the workers measures, all of them at the same time, as the workers of a run do.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import sys
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from oobleck.control.plans import profile_key
from oobleck.errors import ConfigError
from oobleck.host.machine import this_machine
from oobleck.host.streams import answer_with
from oobleck.job import JobSpec
from oobleck.planner import Profile, profile_from_json, profile_to_json
from oobleck.planner.profiles import typical_profile
from oobleck.training.assembly import Assembly, assemble
from oobleck.training.comm import choose_device, device_memory_bytes
from oobleck.training.model import require_compiler
from oobleck.wire import decode_json, encode_json

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
    if job.compile:
        require_compiler(choose_device(job.device, 0))
    threads, memory_bytes = _share(job, 0, workers)
    assembly = _assembled(job, cache_dir, threads)
    structure = assembly.structure
    key = profile_key(
        job,
        layer_names=structure.layer_names,
        parameters=structure.num_parameters,
        device=(
            device_name(choose_device(job.device, 0)),
            memory_bytes,
            threads,
            this_machine().num_cores,
            workers,
        ),
        versions=(platform.python_version(), str(torch.__version__)),
    )
    if not is_fresh and (cached := _cached(profile_dir / f"{key}.json")) is not None:
        return {"key": key, "profile": cached, "was_cached": True}
    profile = _measured_beside(job, cache_dir, assembly, workers) if workers > 1 else _measured(assembly, memory_bytes)
    return {"key": key, "profile": profile_to_json(profile), "was_cached": False}


def _share(job: JobSpec, index: int, workers: int) -> tuple[int, int]:
    """Return the threads and the bytes of memory of one worker: its profile is measured with no more than that."""
    machine = this_machine()
    threads = job.torch_threads or max(1, machine.usable_cores // workers)
    memory_bytes = (
        device_memory_bytes(choose_device(job.device, index), num_sharing=1, wanted_bytes=job.device_memory_bytes)
        or job.device_memory_bytes
        or machine.usable_memory_bytes // workers
    )
    return threads, memory_bytes


def _assembled(job: JobSpec, cache_dir: Path, threads: int) -> Assembly:
    torch.set_num_threads(threads)
    return assemble(job, cache_dir=cache_dir)


def _measured(assembly: Assembly, memory_bytes: int) -> Profile:
    return profile_of_job(assembly, device_memory_bytes=memory_bytes)


def _measured_beside(job: JobSpec, cache_dir: Path, assembly: Assembly, workers: int) -> Profile:
    """Measure while a process for each other worker does, and return the typical profile.

    Raises RuntimeError or EOFError if one of them fails.
    """
    # Processes that start again, because torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    begin, job_json = context.Barrier(workers), encode_json(job)
    answers = []
    for index in range(1, workers):
        answer, given = context.Pipe(duplex=False)
        arguments = job_json, cache_dir, index, workers, begin, given
        context.Process(target=_measure_beside, args=arguments, daemon=True).start()
        given.close()  # else the end of that process would not end the pipe
        answers.append(answer)
    begin.wait()  # raises BrokenBarrierError once another process has failed
    profiles = [_measured(assembly, _share(job, 0, workers)[1])]
    profiles += [profile_from_json(answer.recv(), source="another process") for answer in answers]
    return typical_profile(profiles)


def _measure_beside(
    job_json: bytes, cache_dir: Path, index: int, workers: int, begin: Barrier, answer: Connection[str, str]
) -> None:
    try:
        job = decode_json((JobSpec,), job_json.decode())
        # A machine has at most as many GPUs as workers that share it: they take them in turn.
        if job.device == "cuda":
            index %= torch.cuda.device_count()
            torch.cuda.set_device(index)
        threads, memory_bytes = _share(job, index, workers)
        assembly = _assembled(job, cache_dir, threads)
        begin.wait()
    except BaseException:
        begin.abort()  # else the others would wait without end
        raise
    answer.send(profile_to_json(_measured(assembly, memory_bytes)))


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
