"""A node check's look at GPUs: what NVML tells of each while it computes, and how fast it computes and copies.

NVML is asked through pynvml (`nvidia-ml-py`), which is pure Python and loads the driver's library. It is an extra of
this package's: without it GPUs are measured, and the check says what it could not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from oobleck.control.node_check import ClockLimit, GpuFacts, GpuReading, NvmlState

_PRODUCT = 8192
_COPY_BYTES = 1 << 30
_LOAD_S = 0.3
"""For so long a GPU computes before its clocks are read: they follow its load and heat with some delay."""
_BATCH = 8
"""Products that are launched at once: the GPU is never idle while it is measured."""

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
    """NVML, or why there is none."""

    nvml: Any
    """The module pynvml, or what stands for it."""
    state: NvmlState = NvmlState.READ
    error: str = ""

    def read(self, facts: GpuFacts, uuid: str) -> GpuFacts:
        """Return what is known of a GPU with what NVML says of it now."""
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
    """Begin to use NVML, where it is there."""
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
        """Not every GPU, driver and machine can tell everything; one that is lost is another matter."""
        try:
            return question()
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
            raise
        except nvml.NVMLError:
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
        clock_limits=_limits(nvml, reasons or 0),
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


def _limits(nvml: Any, reasons: int) -> tuple[ClockLimit, ...]:
    return tuple(limit for name, limit in _LIMITS if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}"))


def _repairs(nvml: Any, handle: object) -> tuple[bool, bool]:
    """Whether a repair of memory waits for a reset, and whether one failed: of rows, or of pages before Ampere."""
    try:
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError_NotSupported:
        return bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)), False
    return bool(is_pending), bool(has_failed)


def _nvlinks(nvml: Any, handle: object) -> tuple[int, int]:
    """How many NVLinks a GPU has, and how many of them are up."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            break  # it has no more
    if not states:
        raise nvml.NVMLError_NotSupported
    return len(states), sum(states)


# --- speed -----------------------------------------------------------------------------------------------------------


class GpuSpeed:
    """Measures a device: how fast it multiplies matrices in bfloat16, and how fast it copies."""

    def __init__(
        self,
        device: torch.device,
        *,
        size: int = _PRODUCT,
        copy_bytes: int = _COPY_BYTES,
        least_s: float = _LOAD_S,
    ) -> None:
        """Products of `size` rows and columns, copies of `copy_bytes`; each is measured for `least_s` seconds."""
        self._device = device
        self._least_s = least_s
        self._size = size
        self._copy_bytes = copy_bytes

    def product_flops(self, while_it_runs: Callable[[], T]) -> tuple[float, T]:
        """Return operations a second, and what was looked at while it computed. Raises RuntimeError."""
        left = torch.ones(self._size, self._size, dtype=torch.bfloat16, device=self._device)
        right, out = torch.ones_like(left), torch.empty_like(left)

        def batch() -> None:
            for _ in range(_BATCH):
                torch.mm(left, right, out=out)

        batch_s = self._seconds(batch)
        batch()
        batch()
        seen = while_it_runs()
        batch_s = min(batch_s, self._seconds(batch))
        return 2 * self._size**3 * _BATCH / batch_s, seen

    def memory_bytes_per_s(self) -> float:
        """Return bytes a second, of which a copy reads one half and writes the other. Raises RuntimeError."""
        source = torch.ones(self._copy_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * self._copy_bytes / self._seconds(lambda: target.copy_(source))

    def _seconds(self, work: Callable[[], object]) -> float:
        """The shortest of several."""
        best_s, began_s = float("inf"), time.perf_counter()
        self._settle()
        while best_s == float("inf") or time.perf_counter() - began_s < self._least_s:
            start_s = time.perf_counter()
            work()
            self._settle()
            best_s = min(best_s, time.perf_counter() - start_s)
        return best_s

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_gpus() -> tuple[GpuFacts, ...]:
    """Look at all GPUs of this machine, one after the other. Raises RuntimeError where one computes nothing."""
    if not torch.cuda.is_available():
        return ()
    reader = open_nvml()
    return tuple(_measure(reader, torch.device("cuda", index)) for index in range(torch.cuda.device_count()))


def _measure(reader: GpuReader, device: torch.device) -> GpuFacts:
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    return measure_gpu(
        GpuFacts(index=device.index, name=str(properties.name), nvml=reader.state), uuid, reader, GpuSpeed(device)
    )


def measure_gpu(facts: GpuFacts, uuid: str, reader: GpuReader, speed: GpuSpeed) -> GpuFacts:
    """Return what is found of one GPU; NVML's word alone where nothing can be computed. Raises RuntimeError."""
    before = reader.read(facts, uuid)
    if before.nvml in (NvmlState.LOST, NvmlState.RESET_NEEDED):
        return before
    flops, seen = speed.product_flops(lambda: reader.read(facts, uuid))
    return replace(seen, product_flops=flops, memory_bytes_per_s=speed.memory_bytes_per_s())
