"""Tier A: NCCL's manners, copies, forked workers, and failures of the device."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from oobleck.control.node_check import NvmlState
from oobleck.planner import WorkerId
from oobleck.training.checkpoint.digests import sum_of_words
from oobleck.training.comm import RendezvousStore, RendezvousTable
from oobleck.training.comm.devices import prepare_nccl
from oobleck.training.comm.nccl import NcclGroup
from oobleck.training.comm.staging import CopyStreams, HostCopy
from oobleck.training.process.gpu_probe import measure_gpus
from tools.gpu.checks import ROOT, Check, Numbers, exactly, exit_code_of, within
from tools.gpu.prerequisites import Need

__all__ = ["CHECKS", "FAKES"]

FAKES = (
    "tests/training/comm/test_nccl.py",
    "tests/training/comm/test_edges.py",
    "tests/training/comm/test_staging.py",
    "tests/training/step/test_step.py",
    "tests/training/step/test_linked_stages.py",
    "tests/training/step/test_reading.py",
    "tests/training/checkpoint/test_digests.py",
    "tests/training/checkpoint/test_flash_saver.py",
    "tests/training/model/test_device.py",
    "tests/training/process/test_gpu_probe.py",
)


def _fakes() -> Numbers:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FAKES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=450, check=False)
    sys.stderr.write("" if done.returncode == 0 else done.stdout)
    return {"exit_code": done.returncode}


def _nccl_alone() -> Numbers:
    """A world of one over the store that workers use."""
    device = torch.device("cuda", 0)
    prepare_nccl("127.0.0.1")
    store = RendezvousStore(RendezvousTable(), lambda name, value: None, 60.0)
    kind: Any = vars(dist)["ProcessGroupNCCL"]
    group = NcclGroup("verify", WorkerId(node="here", device=0), device, kind(store, 0, 1, kind.Options()), store)
    group.connect(2 << 20, 60.0)
    tensor = torch.arange(1000.0, device=device)
    under_way = group.all_reduce(tensor)
    while not under_way.is_done():
        time.sleep(1e-4)
    under_way.conclude()
    is_whole = torch.equal(tensor.cpu(), torch.arange(1000.0))
    began_s = time.monotonic()
    group.abort()
    while any(thread.name.startswith("abort ") for thread in threading.enumerate()):
        time.sleep(1e-3)
    return {"is_whole": is_whole, "abort_s": time.monotonic() - began_s}


def _copies() -> Numbers:
    """There and back on streams of their own, while the GPU computes; and the digest on both sides."""
    device, wrong = torch.device("cuda", 0), 0
    streams = CopyStreams(device)
    for seed in range(50):
        values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
        computed = values.to(device) * 3.0
        heavy = torch.randn(2048, 2048, device=device) @ torch.randn(2048, 2048, device=device)
        copy = HostCopy(computed, streams).wait()
        room = streams.room(tuple(copy.shape), copy.dtype)
        streams.join(streams.copy_in(copy, room), room)
        wrong += not torch.equal((room + heavy.sum() * 0).cpu(), values * 3.0)
        wrong += int(sum_of_words(computed)) != int(sum_of_words(copy))
    return {"wrong": wrong}


_FORKED = """
import os, sys
import torch
import oobleck.training.process.worker
assert not torch.cuda.is_initialized()
children = []
for _ in range(4):
    if (pid := os.fork()) == 0:
        torch.cuda.set_device(0)
        os._exit(0 if float(torch.ones(1000, device="cuda").sum()) == 1000.0 else 1)
    children.append(pid)
sys.exit(max(os.waitpid(pid, 0)[1] for pid in children) != 0)
"""


def _forked() -> Numbers:
    """CUDA in four children of a process that has imported what the fork server imports."""
    return {"exit_code": exit_code_of(_FORKED)}


_FAILING = """
import sys, torch
from oobleck.training.process.errors import kind_of
try:
    FAULT
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error, file=sys.stderr)
    sys.exit({"device": 40, "memory": 41}.get(kind_of(error).value, 42))
"""


def _failures() -> Numbers:
    """A device-side assert, and more memory than there is, each in a process of its own."""
    index = "torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')]"
    memory = "torch.empty(1 << 50, device='cuda')"
    return {
        "assert": exit_code_of(_FAILING.replace("FAULT", index)),
        "oom": exit_code_of(_FAILING.replace("FAULT", memory)),
    }


def _readings() -> Numbers:
    """What NVML tells of the first GPU."""
    facts = measure_gpus()[0]
    return {"is_read": facts.nvml is NvmlState.READ, "max_mhz": facts.max_sm_mhz or 0, "lanes": facts.pcie_width or 0}


CHECKS: Sequence[Check] = (
    Check(
        tier="A",
        name="fakes of CUDA and NCCL",
        measure=_fakes,
        judge=exactly(exit_code=0),
        num_gpus=0,
        needs=(Need.TESTS,),
    ),
    Check(tier="A", name="NCCL alone", measure=_nccl_alone, judge=within({"is_whole": 1}, {"abort_s": 1.0})),
    Check(tier="A", name="copies beside computing", measure=_copies, judge=exactly(wrong=0)),
    Check(
        tier="A",
        name="CUDA in forked workers",
        measure=_forked,
        judge=exactly(exit_code=0),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="A",
        name="failures of the device",
        measure=_failures,
        judge=exactly(**{"assert": 40, "oom": 41}),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="A",
        name="NVML",
        measure=_readings,
        judge=within({"is_read": 1, "max_mhz": 100, "lanes": 1}, {}),
        needs=(Need.NVML,),
    ),
)
