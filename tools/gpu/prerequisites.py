"""What the checks need of a machine beside GPUs, and what of it is missing, before anything starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

__all__ = ["Machine", "Need", "missing", "survey"]

_SAVED_BYTES = 9 << 30
"""Both slots of a state of 2 GiB, what torch.save and DCP write of it, and what else is there."""
_OF_TESTS = ("pytest", "hypothesis", "pytest_timeout", "pytest_trio")
_GIB = 1 << 30
_SHARED = "/dev/shm"  # noqa: S108  where the product keeps states too


class Need(Enum):
    """What a check may need."""

    DRIVER = "GPUs"
    SHARED_MEMORY = "shared memory"
    SHARED_GPU = "compute mode"
    COMPILER = "C compiler"
    TESTS = "packages of the tests"
    NVML = "nvidia-ml-py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is here."""

    cuda: str | None
    """The version that torch is built for; None for a build without CUDA."""
    num_gpus: int
    compute_modes: Sequence[str]
    """As nvidia-smi names them; none where it could not be asked."""
    shared_memory_bytes: int
    """Free in /dev/shm."""
    compiler: str | None
    has_python_headers: bool
    packages: frozenset[str]
    """Those of the packages that checks import which can be imported."""


def survey() -> Machine:
    """Look at this machine."""
    room = os.statvfs(_SHARED)
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
    return Machine(
        cuda=torch.version.cuda,
        num_gpus=torch.cuda.device_count(),
        compute_modes=_compute_modes(),
        shared_memory_bytes=room.f_bavail * room.f_frsize,
        compiler=compiler if compiler is None or shutil.which(compiler.split()[0]) else None,
        has_python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        packages=frozenset(name for name in (*_OF_TESTS, "pynvml") if importlib.util.find_spec(name)),
    )


def _compute_modes() -> Sequence[str]:
    command = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ()
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()] if asked.returncode == 0 else ()


def missing(machine: Machine) -> Mapping[Need, str]:
    """Return what is not met, with what to do about it."""
    found: dict[Need, str] = {}
    if machine.cuda is None:
        found[Need.DRIVER] = "torch is a build without CUDA; install one with it (pytorch.org names the index)"
    elif machine.num_gpus == 0:
        found[Need.DRIVER] = (
            f"torch, built for CUDA {machine.cuda}, sees no GPU; `nvidia-smi` shows whether the driver does, and "
            "CUDA_VISIBLE_DEVICES whether it may"
        )
    if machine.shared_memory_bytes < _SAVED_BYTES:
        free, needed = machine.shared_memory_bytes / _GIB, _SAVED_BYTES / _GIB
        found[Need.SHARED_MEMORY] = (
            f"{_SHARED} has {free:.2f} GiB free, and a save of 2 GiB needs {needed:.0f}; start the container with "
            "--shm-size=16g"
        )
    if closed := sorted({mode for mode in machine.compute_modes if mode != "Default"}):
        found[Need.SHARED_GPU] = (
            f"compute mode {' and '.join(closed)} keeps processes from sharing a GPU; `nvidia-smi -c DEFAULT` lets them"
        )
    if machine.compiler is None:
        found[Need.COMPILER] = "there is no C compiler, which Triton needs; install gcc or clang, or set CC"
    elif not machine.has_python_headers:
        found[Need.COMPILER] = "there is no Python.h, which Triton needs; install python3-dev"
    if lacking := [name for name in _OF_TESTS if name not in machine.packages]:
        found[Need.TESTS] = (
            f"{', '.join(lacking)} cannot be imported; pip install 'oobleck-train[test]', or use --wheels"
        )
    if "pynvml" not in machine.packages:
        found[Need.NVML] = "pynvml cannot be imported; pip install nvidia-ml-py, or use --wheels"
    return found
