"""Tier A: copies and two steps of training under the sanitizers of torch and of CUDA.

torch's reports work of two streams on the same memory that nothing orders; compute-sanitizer, accesses out of bounds.
Run as a script it is what they watch: `python tools/gpu/sanitized.py DEVICE`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.cuda._sanitizer import enable_cuda_sanitizer

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.planner import WorkerId
from oobleck.schedule import ScheduleKind
from oobleck.training.comm.staging import CopyStreams, HostCopy
from tools.gpu.checks import ROOT, Check, Numbers, exactly
from tools.gpu.prerequisites import Need
from tools.gpu.training import Bench, Size

__all__ = ["CHECKS", "measure_sanitized"]

_SIZE = Size(hidden=32, blocks=2, length=16, num_steps=2, num_microbatches=4)
_NUM_COPIES = 5
_TIMEOUT_S = 200
_MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "97")


def measure_sanitized(
    device: str, *, command: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Numbers:
    """Run this file below a command, with more in its environment; what it says goes to standard error if it fails."""
    done = subprocess.run(
        [*command, sys.executable, str(Path(__file__)), device],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
    return {"exit_code": done.returncode}


def _copy(device: str) -> None:
    """Take tensors to the host and back on streams of their own. Raises RuntimeError for one that has changed."""
    streams = CopyStreams.on(torch.device(device))
    for seed in range(_NUM_COPIES):
        values = torch.randn(1 << 12, generator=torch.Generator().manual_seed(seed))
        copy = HostCopy(values.to(device) * 2.0, streams).wait()
        if streams is not None:
            room = streams.room(tuple(copy.shape), copy.dtype)
            streams.join(streams.copy_in(copy, room), room)
            copy = room.cpu()
        if not torch.equal(copy, values * 2.0):
            raise RuntimeError(f"copy {seed} is not what was copied")


def _watch(_: WorkerId) -> None:
    """Have torch watch this worker, as it would have from its import on."""
    enable_cuda_sanitizer()  # type: ignore[no-untyped-call]


def _main(device: str) -> None:
    _copy(device)
    # What workers are forked from must have no CUDA context, and torch makes one with the first operation it watches.
    is_watched = os.environ.pop("TORCH_CUDA_SANITIZER", None) is not None
    job, plan = _SIZE.job(device), _SIZE.plan(2)
    with (
        tempfile.TemporaryDirectory() as directory,
        Bench(Path(directory)).workers(job, plan, _watch if is_watched else None) as workers,
    ):
        trained = workers.train(plan, ScheduleKind.ONE_F_ONE_B)
    if len(trained.records) != _SIZE.num_steps:
        raise RuntimeError(f"{len(trained.records)} of {_SIZE.num_steps} steps are committed")


def _why_no_memcheck() -> str | None:
    return None if shutil.which(_MEMCHECK[0]) else f"{_MEMCHECK[0]} is not on PATH; it comes with the CUDA toolkit"


CHECKS: Sequence[Check] = (
    Check(
        tier="A",
        name="torch's CUDA sanitizer",
        measure=lambda: measure_sanitized("cuda", environment={"TORCH_CUDA_SANITIZER": "1"}),
        judge=exactly(exit_code=0),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="A",
        name="compute-sanitizer",
        measure=lambda: measure_sanitized("cuda", command=_MEMCHECK),
        judge=exactly(exit_code=0),
        needs=(Need.SHARED_GPU,),
        why_not=_why_no_memcheck,
    ),
)

if __name__ == "__main__":
    _main(sys.argv[1])
