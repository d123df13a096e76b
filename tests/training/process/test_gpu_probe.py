"""What is read of GPUs, with a fake of NVML that refuses as NVML does; and rates, measured on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from oobleck.control.node_check import (
    CheckedNode,
    CheckReport,
    ClockLimit,
    GpuFacts,
    GpuReading,
    Health,
    NodeVerdict,
    NvmlState,
    ProbeAnswer,
    SoloDone,
    findings_about,
)
from oobleck.control.node_check.gpus import GpuProblem
from oobleck.json_table import to_json
from oobleck.training.process.gpu_probe import GpuReader, GpuSpeed, measure_gpu, open_nvml
from oobleck.wire import FrameDecoder, encode_frame

from .fake_nvml import FakeNvml

H100 = GpuFacts(index=3, name="NVIDIA H100 80GB HBM3", nvml=NvmlState.READ)


def read(nvml: FakeNvml) -> GpuFacts:
    return open_nvml(lambda: nvml).read(H100, "GPU-1")


def problems(facts: GpuFacts) -> list[GpuProblem]:
    return [finding.problem for finding in findings_about([facts])]


def test_a_healthy_gpu_is_read_whole():
    nvml = FakeNvml()
    facts = read(nvml)
    assert nvml.asked_for == ["GPU-1"], "by what identifies it: CUDA and NVML count GPUs otherwise"
    assert (facts.nvml, facts.unread) == (NvmlState.READ, ())
    assert (facts.sm_mhz, facts.max_sm_mhz, facts.clock_limits) == (1755, 1980, (ClockLimit.POWER_CAP,))
    assert (facts.corrected, facts.uncorrected, facts.repair_waits, facts.repair_failed) == (0, 0, False, False)
    assert (facts.pcie_width, facts.max_pcie_width, facts.pcie_generation, facts.max_pcie_generation) == (16, 16, 5, 5)
    assert (facts.num_nvlinks, facts.num_nvlinks_up) == (18, 18)
    assert problems(facts) == []


@pytest.mark.parametrize(
    ("reasons", "limits"),
    [
        (0x1, [ClockLimit.IDLE]),
        (0x48, [ClockLimit.HARDWARE, ClockLimit.HARDWARE_HEAT]),
        (0x1B6, [*list(ClockLimit)[1:3], *list(ClockLimit)[4:6], *list(ClockLimit)[7:9]]),
        (0x1 << 30, []),
    ],
)
def test_what_holds_clocks_down_is_told_apart(reasons: int, limits: list[ClockLimit]):
    assert list(read(FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=reasons)).clock_limits) == limits


def test_what_a_gpu_does_not_have_is_left_out_and_named():
    facts = read(
        FakeNvml(
            num_links=0,
            nvmlDeviceGetTotalEccErrors=FakeNvml.NVMLError_NotSupported,
            nvmlDeviceGetRemappedRows=FakeNvml.NVMLError_FunctionNotFound,
            nvmlDeviceGetCurrPcieLinkWidth=FakeNvml.NVMLError_NoPermission,
        )
    )
    assert facts.nvml is NvmlState.READ
    assert set(facts.unread) == {GpuReading.ECC, GpuReading.REPAIRS, GpuReading.PCIE, GpuReading.NVLINK}
    assert (facts.uncorrected, facts.repair_waits, facts.pcie_width, facts.num_nvlinks) == (None,) * 4
    assert facts.sm_mhz == 1755
    assert problems(facts) == []


def test_gpus_before_ampere_retire_pages_in_place_of_rows():
    facts = read(
        FakeNvml(
            nvmlDeviceGetRemappedRows=FakeNvml.NVMLError_NotSupported,
            nvmlDeviceGetRetiredPagesPendingStatus=1,
        )
    )
    assert (facts.repair_waits, facts.repair_failed) == (True, False)


def test_links_past_the_last_are_none_and_those_that_are_down_count():
    facts = read(FakeNvml(num_links=12, links_down=(3, 7)))
    assert (facts.num_nvlinks, facts.num_nvlinks_up) == (12, 10)
    assert problems(facts) == [GpuProblem.NVLINK]


@pytest.mark.parametrize(
    ("nvml", "state"),
    [
        (FakeNvml(everything=FakeNvml.NVMLError_GpuIsLost), NvmlState.LOST),
        (FakeNvml(nvmlDeviceGetMaxPcieLinkWidth=FakeNvml.NVMLError_GpuIsLost), NvmlState.LOST),
        (FakeNvml(everything=FakeNvml.NVMLError_ResetRequired), NvmlState.RESET_NEEDED),
        (FakeNvml(everything=FakeNvml.NVMLError_NoPermission), NvmlState.REFUSED),
        (FakeNvml(nvmlInit=FakeNvml.NVMLError_LibraryNotFound), NvmlState.NO_DRIVER),
        (FakeNvml(nvmlInit=FakeNvml.NVMLError_DriverNotLoaded), NvmlState.NO_DRIVER),
        (FakeNvml(nvmlInit=FakeNvml.NVMLError_Unknown), NvmlState.REFUSED),
    ],
)
def test_a_gpu_that_nvml_does_not_answer_for_is_said_to_be_so(nvml: FakeNvml, state: NvmlState):
    facts = read(nvml)
    assert facts.nvml is state
    assert (facts.sm_mhz, facts.pcie_width) == (None, None)
    assert bool(facts.error) == (state is NvmlState.REFUSED)


def test_without_pynvml_gpus_are_measured_all_the_same():
    def missing() -> object:
        raise ImportError("No module named 'pynvml'")

    facts = measure_gpu(H100, "GPU-1", open_nvml(missing), small_speed())
    assert facts.nvml is NvmlState.NO_MODULE
    assert facts.product_flops is not None
    assert GpuProblem.NOT_READ in problems(facts)


def test_what_is_found_reaches_the_checker_and_a_program_that_reads_the_report():
    facts = replace(read(FakeNvml(num_links=0)), product_flops=6.5e14)
    lost = replace(H100, nvml=NvmlState.LOST)
    done = SoloDone(seconds={"compute": 1e-3}, gpus=(facts, lost))
    decoder: FrameDecoder[ProbeAnswer] = FrameDecoder(ProbeAnswer)
    assert decoder.feed(encode_frame(done)) == [done]
    verdict = NodeVerdict(node="a", health=Health.FAULTY, reason="")
    node = CheckedNode(verdict=verdict, gpus=done.gpus, findings=findings_about(done.gpus))
    report = CheckReport(nodes=(node,), links=(), exchanges=(), num_rounds=1, elapsed_s=1.0)
    (told,) = json.loads(to_json(report.to_dict()))["nodes"]
    assert told["gpus"][0]["clock_limits"] == ["power cap"]
    assert told["gpus"][0]["unread"] == ["NVLink"]
    assert [(each["gpu"], each["problem"], each["health"]) for each in told["findings"]] == [(3, "lost", "faulty")]


def small_speed() -> GpuSpeed:
    return GpuSpeed(torch.device("cpu"), size=64, copy_bytes=1 << 16, least_s=0.01)


class Speed(GpuSpeed):
    """Notes what is going on while NVML is read."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_computing = False
        self.num_products = 0

    def product_flops(self, while_it_runs):
        self.is_computing = True
        self.num_products += 1
        seen = while_it_runs()
        self.is_computing = False
        return 7e14, seen

    def memory_bytes_per_s(self) -> float:
        return 3e12


def test_clocks_are_read_while_the_gpu_computes():
    speed, computing = Speed(), []

    class Nvml(FakeNvml):
        def nvmlDeviceGetNvLinkState(self, handle: object, link: int) -> int:  # noqa: N802  NVML's own name
            computing.append(speed.is_computing)
            return super().nvmlDeviceGetNvLinkState(handle, link)

    nvml = Nvml(num_links=1)
    facts = measure_gpu(H100, "GPU-1", open_nvml(lambda: nvml), speed)
    assert computing[-1]
    assert (facts.product_flops, facts.memory_bytes_per_s, facts.sm_mhz) == (7e14, 3e12, 1755)


@pytest.mark.parametrize("error", [FakeNvml.NVMLError_GpuIsLost, FakeNvml.NVMLError_ResetRequired])
def test_nothing_is_computed_on_a_gpu_that_cannot(error: type[Exception]):
    speed = Speed()
    facts = measure_gpu(H100, "GPU-1", GpuReader(nvml=FakeNvml(everything=error)), speed)
    assert speed.num_products == 0
    assert facts.product_flops is None
    assert problems(facts) == [GpuProblem.LOST if error is FakeNvml.NVMLError_GpuIsLost else GpuProblem.RESET_NEEDED]


def test_rates_count_operations_and_bytes():
    """Of a device that takes no time at all they would be without end; a CPU's are below any GPU's."""
    flops, seen = small_speed().product_flops(lambda: "seen")
    assert seen == "seen"
    assert 1e5 < flops < 1e14
    assert 1e5 < small_speed().memory_bytes_per_s() < 1e13
