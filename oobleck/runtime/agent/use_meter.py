"""What a node's processes use of its machine: processor time, memory, and GPUs where NVML is installed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import trio

from oobleck.control.protocol import DeviceUse, NodeUse
from oobleck.host.machine import Machine

from .workers import family_of, processor_s


def _nvml() -> Any:
    """Return the module pynvml; None if it is not installed, or there is no driver that it can ask."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class UseMeter:
    """Implements `roles.agent_ports.UseMeter`."""

    def __init__(self, machine: Machine, *, load_nvml: Callable[[], Any] = _nvml) -> None:
        self._machine = machine
        self._nvml = cache(load_nvml)
        self._measured_s = trio.current_time()
        self._used_s: dict[int, float] = {}

    async def measure(self, pids: Sequence[int], gpu_ids: Sequence[str]) -> NodeUse:
        now_s = trio.current_time()
        # The workers of all nodes of a machine descend from the agent that has started their fork server.
        used_s = {os.getpid(): time.process_time(), **{pid: processor_s(pid) for pid in pids}}
        # What a process used before its first measurement was not used since the last one.
        spent_s = sum(used_s[pid] - self._used_s[pid] for pid in used_s.keys() & self._used_s.keys())
        within_s, self._measured_s, self._used_s = now_s - self._measured_s, now_s, used_s
        family = {os.getpid(), *(each for pid in pids for each in family_of(pid))}
        return NodeUse(
            cores=max(0.0, spent_s / within_s) if within_s > 0 else 0.0,
            num_cores=self._machine.usable_cores,
            used_bytes=sum(map(_own_bytes, family)),
            memory_bytes=self._machine.usable_memory_bytes,
            devices=await self._devices(gpu_ids) if gpu_ids else (),
        )

    async def _devices(self, gpu_ids: Sequence[str]) -> tuple[DeviceUse, ...]:
        # The driver may take long to answer, and that of a lost GPU never; the agent can end all the same.
        return await trio.to_thread.run_sync(self._asked, gpu_ids, abandon_on_cancel=True)

    def _asked(self, gpu_ids: Sequence[str]) -> tuple[DeviceUse, ...]:
        if (nvml := self._nvml()) is None:
            return ()
        uses = []
        with suppress(nvml.NVMLError):
            for gpu_id in gpu_ids:
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu_id)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                uses.append(DeviceUse(busy=busy, used_bytes=memory.used, memory_bytes=memory.total))
        return tuple(uses)


def _own_bytes(pid: int) -> int:
    """Return the memory of a process that is not a file's, such as a library's; 0 once it is gone."""
    kilobytes = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                kilobytes += int(value.split()[0])
    return kilobytes * 1024
