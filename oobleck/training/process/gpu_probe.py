"""Measures GPUs for a node check: what NVML reports of each while it computes, and how fast it computes and copies.

NVML is read through pynvml (`nvidia-ml-py`), which is pure Python and loads the driver's library. It is an optional
extra: without it GPUs are measured, and the check reports what it could not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar

import torch

from oobleck.control.node_check import ClockLimit, GpuFacts, GpuReading, NvmlState

_PRODUCT = 8192
_COPY_BYTES = 1 << 30
_LOAD_S = 0.3  # clocks follow load and heat with some delay
_BATCH = 8  # products launched at once, so that the GPU is never idle while it is measured

_LIMITS = (
    ("GpuIdle", ClockLimit.IDLE),
    ("ApplicationsClocksSetting", ClockLimit.APPLICATION),
    ("SwPowerCap", ClockLimit.POWER_CAP),
    ("HwSlowdown", ClockLimit.HARDWARE),
    ("SyncBoost", ClockLimit.SYNC_BOOST),
    ("SwThermalSlowdown", ClockLimit.HEAT),
    ("HwThermalSlowdown", ClockLimit.HARDWARE_HEAT),
    ("HwPowerBrakeSlowdown", ClockLimit.POWER_BRAKE),
    ("DisplayClockSetting", ClockLimit.DISPLAY),
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReader:
    """The module pynvml, or the reason why it cannot be used."""

    nvml: Any
    state: NvmlState = NvmlState.READ
    error: str = ""

    def read(self, facts: GpuFacts, uuid: str) -> GpuFacts:
        """Return a GPU's facts, completed by what NVML reports now."""
        if self.state is not NvmlState.READ:
            return replace(facts, nvml=self.state, error=self.error)
        nvml = self.nvml
        try:
            return _read(nvml, facts, nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError_GpuIsLost:
            return replace(facts, nvml=NvmlState.LOST)
        except nvml.NVMLError_ResetRequired:
            return replace(facts, nvml=NvmlState.RESET_NEEDED)
        except nvml.NVMLError as error:
            return replace(facts, nvml=NvmlState.REFUSED, error=str(error))


def _load() -> Any:
    import pynvml

    return pynvml


def open_nvml(load: Callable[[], Any] = _load) -> GpuReader:
    """Initialize NVML, if it is installed."""
    try:
        nvml = load()
    except ImportError:
        return GpuReader(nvml=None, state=NvmlState.NO_MODULE)
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return GpuReader(nvml=nvml, state=NvmlState.NO_DRIVER)
    except nvml.NVMLError as error:
        return GpuReader(nvml=nvml, state=NvmlState.REFUSED, error=str(error))
    return GpuReader(nvml=nvml)


def _read(nvml: Any, facts: GpuFacts, handle: object) -> GpuFacts:
    unread: list[GpuReading] = []

    def ask(reading: GpuReading, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
            raise
        except nvml.NVMLError:  # not every GPU, driver and machine reports everything
            if reading not in unread:
                unread.append(reading)
            return None

    def errors(kind: int) -> int | None:
        return ask(GpuReading.ECC, lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)))

    reasons = ask(GpuReading.CLOCK_LIMITS, lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    repairs = ask(GpuReading.REPAIRS, lambda: _repairs(nvml, handle))
    links = ask(GpuReading.NVLINK, lambda: _nvlinks(nvml, handle))
    return replace(
        facts,
        nvml=NvmlState.READ,
        sm_mhz=ask(GpuReading.CLOCKS, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        max_sm_mhz=ask(GpuReading.CLOCKS, lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
        clock_limits=tuple(
            limit for name, limit in _LIMITS if (reasons or 0) & getattr(nvml, f"nvmlClocksThrottleReason{name}")
        ),
        corrected=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        repair_waits=None if repairs is None else repairs[0],
        repair_failed=None if repairs is None else repairs[1],
        pcie_width=ask(GpuReading.PCIE, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        max_pcie_width=ask(GpuReading.PCIE, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
        pcie_generation=ask(GpuReading.PCIE, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
        max_pcie_generation=ask(GpuReading.PCIE, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
        num_nvlinks=None if links is None else links[0],
        num_nvlinks_up=None if links is None else links[1],
        unread=tuple(unread),
    )


def _repairs(nvml: Any, handle: object) -> tuple[bool, bool]:
    """Return whether a repair of memory awaits a reset, and whether one failed."""
    try:
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError_NotSupported:  # GPUs before Ampere retire pages instead
        return bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)), False
    return bool(is_pending), bool(has_failed)


def _nvlinks(nvml: Any, handle: object) -> tuple[int, int]:
    """Return the number of a GPU's NVLinks, and of those that are up."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            break  # the GPU has no link of this number
    if not states:
        # `_read` notes it as unread, which differs from links that are down.
        raise nvml.NVMLError_NotSupported
    return len(states), sum(states)


@dataclass(slots=True)
class GpuSpeed:
    """Measures how fast a device multiplies matrices in bfloat16, and how fast it copies."""

    device: torch.device
    _: KW_ONLY
    size: int = _PRODUCT
    """Rows and columns of the matrices."""
    copy_bytes: int = _COPY_BYTES
    least_s: float = _LOAD_S
    """Seconds for which each of the two is measured at least."""

    def product_flops(self, while_it_runs: Callable[[], T]) -> tuple[float, T]:
        """Return operations a second, and the result of `while_it_runs`. Raises RuntimeError."""
        left = torch.ones(self.size, self.size, dtype=torch.bfloat16, device=self.device)
        right, out = torch.ones_like(left), torch.empty_like(left)

        def batch() -> None:
            for _ in range(_BATCH):
                torch.mm(left, right, out=out)

        batch_s = self._seconds(batch)
        # These are not waited for: the GPU computes while the function runs.
        batch()
        batch()
        seen = while_it_runs()
        # Clocks rise under load, so the second measurement may be the faster one.
        batch_s = min(batch_s, self._seconds(batch))
        return 2 * self.size**3 * _BATCH / batch_s, seen

    def memory_bytes_per_s(self) -> float:
        """Return bytes a second, of which a copy reads one half and writes the other. Raises RuntimeError."""
        source = torch.ones(self.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * self.copy_bytes / self._seconds(lambda: target.copy_(source))

    def _seconds(self, work: Callable[[], object]) -> float:
        best_s, began_s = float("inf"), time.perf_counter()
        self._synchronize()
        while best_s == float("inf") or time.perf_counter() - began_s < self.least_s:
            start_s = time.perf_counter()
            work()
            self._synchronize()
            best_s = min(best_s, time.perf_counter() - start_s)
        return best_s

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_gpus() -> tuple[GpuFacts, ...]:
    """Measure all GPUs of this machine, one after the other. Raises RuntimeError where one computes nothing."""
    if not torch.cuda.is_available():
        return ()
    reader, gpus = open_nvml(), []
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        # NVML counts GPUs that CUDA_VISIBLE_DEVICES hides, so only the UUID names the same GPU to both.
        uuid = f"GPU-{str(properties.uuid).removeprefix('GPU-')}"  # torch leaves NVML's prefix out
        facts = GpuFacts(index=index, name=str(properties.name), nvml=reader.state)
        gpus.append(measure_gpu(facts, uuid, reader, GpuSpeed(torch.device("cuda", index))))
    return tuple(gpus)


def measure_gpu(facts: GpuFacts, uuid: str, reader: GpuReader, speed: GpuSpeed) -> GpuFacts:
    """Return the facts of one GPU, without its speed where it cannot compute. Raises RuntimeError."""
    before = reader.read(facts, uuid)
    if before.nvml in (NvmlState.LOST, NvmlState.RESET_NEEDED):
        return before
    flops, seen = speed.product_flops(lambda: reader.read(facts, uuid))
    return replace(seen, product_flops=flops, memory_bytes_per_s=speed.memory_bytes_per_s())
