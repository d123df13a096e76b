"""NVML without a GPU, as pynvml gives it: functions and constants of its names, and errors that are its classes.

From pynvml of `nvidia-ml-py` 13.615: each error is a subclass of NVMLError, whose text NVML has; what a GPU, a driver
or a virtual machine cannot tell is NotSupported, NoPermission, or FunctionNotFound in an older driver; a GPU that is
lost answers everything with GpuIsLost; links past a GPU's last are InvalidArgument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FakeNvml"]

_REASONS = {
    "GpuIdle": 0x1,
    "ApplicationsClocksSetting": 0x2,
    "SwPowerCap": 0x4,
    "HwSlowdown": 0x8,
    "SyncBoost": 0x10,
    "SwThermalSlowdown": 0x20,
    "HwThermalSlowdown": 0x40,
    "HwPowerBrakeSlowdown": 0x80,
    "DisplayClockSetting": 0x100,
}


class NVMLError(Exception):
    pass


def _error(name: str, text: str) -> type[NVMLError]:
    return type(f"NVMLError_{name}", (NVMLError,), {"__str__": lambda _: text})


class FakeNvml:
    """Stands for the module. What it answers is a healthy H100's, but for `answers`, by the function's name."""

    NVMLError = NVMLError
    NVMLError_DriverNotLoaded = _error("DriverNotLoaded", "Driver Not Loaded")
    NVMLError_FunctionNotFound = _error("FunctionNotFound", "Function Not Found")
    NVMLError_GpuIsLost = _error("GpuIsLost", "GPU is lost")
    NVMLError_InvalidArgument = _error("InvalidArgument", "Invalid Argument")
    NVMLError_LibraryNotFound = _error("LibraryNotFound", "NVML Shared Library Not Found")
    NVMLError_NoPermission = _error("NoPermission", "Insufficient Permissions")
    NVMLError_NotSupported = _error("NotSupported", "Not Supported")
    NVMLError_ResetRequired = _error("ResetRequired", "GPU requires restart")
    NVMLError_Unknown = _error("Unknown", "Unknown Error")

    NVML_CLOCK_SM = 1
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_NVLINK_MAX_LINKS = 36

    def __init__(self, *, num_links: int = 18, links_down: tuple[int, ...] = (), **answers: object) -> None:
        """An answer that is an error's class is raised; all of them are, of a GPU that `everything` is."""
        self._everything = answers.pop("everything", None)
        self._num_links = num_links
        self._links_down = links_down
        self._answers: Mapping[str, object] = {
            "nvmlInit": None,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": _REASONS["SwPowerCap"],
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetRetiredPagesPendingStatus": 0,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        } | answers
        self.asked_for: list[str] = []

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802  NVML's own name
        self.asked_for.append(uuid)
        if isinstance(self._everything, type):
            raise self._everything
        return uuid

    def nvmlDeviceGetNvLinkState(self, _handle: object, link: int) -> int:  # noqa: N802  NVML's own name
        if self._num_links == 0:
            raise self.NVMLError_NotSupported
        if link >= self._num_links:
            raise self.NVMLError_InvalidArgument
        return int(link not in self._links_down)

    def __getattr__(self, name: str) -> Any:
        if (reason := _REASONS.get(name.removeprefix("nvmlClocksThrottleReason"))) is not None:
            return reason
        if name not in self._answers:
            raise AttributeError(name)

        def answer(*_: object) -> object:
            found = self._answers[name]
            if isinstance(found, type) and issubclass(found, NVMLError):
                raise found
            return found

        return answer
