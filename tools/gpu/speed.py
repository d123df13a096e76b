"""Tier C: what one GPU does beside computing, and how fast it is itself."""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from oobleck.planner import sheet_of_product
from oobleck.training.checkpoint import FlashSaver
from oobleck.training.checkpoint.digests import sum_of_words
from oobleck.training.comm.devices import choose_device
from oobleck.training.comm.staging import CopyStreams, HostCopy
from oobleck.training.process.gpu_probe import measure_gpus
from tools.gpu.checks import Check, NotHere, Numbers, within
from tools.gpu.prerequisites import Need

__all__ = ["CHECKS", "digest_bytes_per_s", "measure_copies", "measure_saves"]

_ROUNDS = 10
_SAVED_WITHIN_S = 60.0


def _digest_speed() -> Numbers:
    return {"gb_per_s": digest_bytes_per_s("cuda", 1 << 29) / 1e9}


def digest_bytes_per_s(device: str, num_elements: int) -> float:
    """Return how much state is digested in a second, at best: a device that was idle runs at a low clock at first."""
    state = torch.randn(num_elements, device=device)

    def once_s() -> float:
        began_s = time.perf_counter()
        int(sum_of_words(state))
        return time.perf_counter() - began_s

    return state.nbytes / min(once_s() for _ in range(_ROUNDS))


def _sheet() -> Numbers:
    """The first GPU as `oobleck check` measures it."""
    facts = measure_gpus()[0]
    if (sheet := sheet_of_product(facts.name)) is None:
        raise NotHere(f"no data sheet of {facts.name} is known; oobleck/planner/profiles/devices.py has those that are")
    assert facts.product_flops is not None
    assert facts.memory_bytes_per_s is not None
    return {
        "product": facts.product_flops / sheet.bfloat16_flops,
        "memory": facts.memory_bytes_per_s / sheet.memory_bytes_per_s,
    }


class _Step:
    """A step of matrix products on a device."""

    def __init__(self, device: str, num_products: int, width: int) -> None:
        self._left = torch.randn(width, width, device=device)
        self._num_products = num_products
        self.run_s()
        self.usual_s = min(self.run_s() for _ in range(5))

    def run_s(self, beside: Callable[[], object] = lambda: None) -> float:
        """Return how long it takes, with what is begun before it."""
        began_s = time.perf_counter()
        beside()
        for _ in range(self._num_products):
            self._left @ self._left
        if self._left.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s


def measure_copies(
    device: str, *, num_messages: int = 8, num_elements: int = 1 << 24, num_products: int = 100, width: int = 4096
) -> Numbers:
    """A step with messages of 64 MiB that are copied to the host beside it, over one without."""
    step, streams = _Step(device, num_products, width), CopyStreams.on(torch.device(device))
    messages = [torch.full((num_elements,), float(number), device=device) for number in range(num_messages)]
    copies: list[HostCopy] = []

    def begin() -> None:
        copies[:] = [HostCopy(message, streams) for message in messages]

    beside_s = min(step.run_s(begin) for _ in range(5))
    wrong = sum(not torch.equal(copy.wait(), message.cpu()) for copy, message in zip(copies, messages, strict=True))
    return {"slowdown": beside_s / step.usual_s, "wrong": wrong}


def measure_saves(
    device: str, *, num_elements: int = 1 << 29, num_products: int = 100, width: int = 4096, num_saves: int = 5
) -> Numbers:
    """Steps beside a save of 2 GB, and how long it keeps training waiting: in seconds, and beside what torch offers."""
    step, state = _Step(device, num_products, width), {0: {"weight": torch.randn(num_elements, device=device)}}
    saved = threading.Event()
    beside, pauses = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        place = Path(directory)
        saver = FlashSaver(place, "device0", metadata={}, report=lambda _: saved.set(), device=choose_device(device, 0))
        saver.prepare(state)
        for number in range(1, num_saves + 1):
            saved.clear()
            began_s = time.perf_counter()
            saver.save(state, name=f"save{number}", step=number, generation=1)
            pauses.append(time.perf_counter() - began_s)
            beside.append(step.run_s())
            saver.settle()
            if not saved.wait(_SAVED_WITHIN_S):
                raise TimeoutError(f"save {number} was not written within {_SAVED_WITHIN_S:g} s")
        plain_s, async_s = _torch_pauses_s(state[0], place)
    pause_s = max(pauses)
    return {
        "slowdown": min(beside) / step.usual_s,
        "pause_s": pause_s,
        "of_torch_save": pause_s / plain_s,
        "of_async_save": pause_s / async_s,
    }


def _torch_pauses_s(state: dict[str, torch.Tensor], directory: Path) -> tuple[float, float]:
    """How long training waits for `torch.save`, and for DCP's `async_save`, which copies and writes in a thread."""
    began_s = time.perf_counter()
    torch.save(state, directory / "plain.pt")
    plain_s = time.perf_counter() - began_s
    (directory / "plain.pt").unlink()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began_s = time.perf_counter()
            saving: Any = async_save(dict(state), storage_writer=FileSystemWriter(directory / "dcp"))
            async_s = time.perf_counter() - began_s
            saving.result()
    finally:
        dist.destroy_process_group()
    return plain_s, async_s


CHECKS: Sequence[Check] = (
    Check(tier="C", name="digests", measure=_digest_speed, judge=within({"gb_per_s": 50.0}, {})),
    Check(
        tier="C",
        name="copies beside a step",
        measure=lambda: measure_copies("cuda"),
        judge=within({}, {"slowdown": 1.02, "wrong": 0}),
    ),
    Check(
        tier="C",
        name="a save beside a step",
        measure=lambda: measure_saves("cuda"),
        judge=within({}, {"slowdown": 1.02, "pause_s": 0.05, "of_torch_save": 1.0, "of_async_save": 1.0}),
        needs=(Need.SHARED_MEMORY,),
    ),
    Check(tier="C", name="data sheet", measure=_sheet, judge=within({"product": 0.5, "memory": 0.65}, {})),
)
