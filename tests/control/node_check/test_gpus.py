"""What is wrong with GPUs, as fields and in words, and what it makes of their node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.node_check.gpus import (
    ClockLimit,
    GpuFacts,
    GpuProblem,
    NvmlState,
    fault_of,
    findings_about,
    sentences_of,
    slowed_by,
)
from oobleck.control.node_check.rounds import Health, NodeVerdict

GOOD = GpuFacts(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    nvml=NvmlState.READ,
    sm_mhz=1755,
    max_sm_mhz=1980,
    clock_limits=(ClockLimit.POWER_CAP,),
    corrected=4,
    uncorrected=0,
    repair_waits=False,
    repair_failed=False,
    pcie_width=16,
    max_pcie_width=16,
    pcie_generation=5,
    max_pcie_generation=5,
    num_nvlinks=18,
    num_nvlinks_up=18,
    product_flops=6.8e14,
    memory_bytes_per_s=2.9e12,
)
HEALTHY = NodeVerdict(node="a", health=Health.HEALTHY, reason="")


def test_nothing_is_found_about_a_gpu_that_does_what_its_data_sheet_says():
    assert findings_about([GOOD]) == ()
    assert fault_of(()) == ""
    assert slowed_by(HEALTHY, ()) == HEALTHY


@pytest.mark.parametrize(
    ("changes", "problem", "health", "found", "expected", "says"),
    [
        ({"nvml": NvmlState.LOST}, GpuProblem.LOST, Health.FAULTY, None, None, "Xid 79"),
        ({"nvml": NvmlState.RESET_NEEDED}, GpuProblem.RESET_NEEDED, Health.FAULTY, None, None, "nvidia-smi -r"),
        ({"uncorrected": 3, "repair_waits": True}, GpuProblem.MEMORY_ERRORS, Health.FAULTY, 3, None, "3 memory errors"),
        ({"uncorrected": 3, "repair_waits": None}, GpuProblem.MEMORY_ERRORS, Health.FAULTY, 3, None, "3 memory errors"),
        ({"repair_waits": True}, GpuProblem.MEMORY_ERRORS, Health.FAULTY, 0, None, "nvidia-smi -r"),
        ({"uncorrected": 3}, GpuProblem.MEMORY_REPAIRED, Health.HEALTHY, 3, None, "spare memory"),
        ({"repair_failed": True}, GpuProblem.REPAIR_FAILED, Health.FAULTY, None, None, "replaced"),
        ({"clock_limits": (ClockLimit.HEAT,)}, GpuProblem.HOT, Health.SLOW, 1755, 1980, "cooling"),
        (
            {"clock_limits": (ClockLimit.HARDWARE, ClockLimit.HARDWARE_HEAT), "sm_mhz": 345},
            GpuProblem.HOT,
            Health.SLOW,
            345,
            1980,
            "345 of 1980 MHz",
        ),
        ({"clock_limits": (ClockLimit.HARDWARE,)}, GpuProblem.POWER, Health.SLOW, 1755, 1980, "power"),
        ({"clock_limits": (ClockLimit.POWER_BRAKE,)}, GpuProblem.POWER, Health.SLOW, 1755, 1980, "power"),
        ({"clock_limits": (ClockLimit.APPLICATION,)}, GpuProblem.CLOCKS_SET, Health.HEALTHY, 1755, 1980, "set lower"),
        ({"pcie_width": 8}, GpuProblem.PCIE_WIDTH, Health.SLOW, 8, 16, "8 of 16 PCIe lanes"),
        ({"pcie_generation": 3}, GpuProblem.PCIE_GENERATION, Health.HEALTHY, 3, 5, "generation 3"),
        ({"num_nvlinks_up": 16}, GpuProblem.NVLINK, Health.SLOW, 16, 18, "16 of 18 NVLinks"),
        ({"product_flops": 4.0e14}, GpuProblem.SLOW_PRODUCT, Health.SLOW, 4.0e14, 989.4e12, "40% of its data sheet"),
        ({"memory_bytes_per_s": 1.5e12}, GpuProblem.SLOW_MEMORY, Health.SLOW, 1.5e12, 3.35e12, "1500 GB/s, 45%"),
        ({"name": "NVIDIA GB300"}, GpuProblem.NO_SHEET, Health.HEALTHY, None, None, "GB300"),
        ({"nvml": NvmlState.NO_MODULE}, GpuProblem.NOT_READ, Health.HEALTHY, None, None, "pip install nvidia-ml-py"),
        ({"nvml": NvmlState.NO_DRIVER}, GpuProblem.NOT_READ, Health.HEALTHY, None, None, "driver"),
        (
            {"nvml": NvmlState.REFUSED, "error": "Insufficient Permissions"},
            GpuProblem.NOT_READ,
            Health.HEALTHY,
            None,
            None,
            "Insufficient Permissions",
        ),
    ],
)
def test_each_problem_is_found_with_its_evidence_and_said_with_what_to_do(
    changes: dict[str, object],
    problem: GpuProblem,
    health: Health,
    found: float | None,
    expected: float | None,
    says: str,
):
    (finding,) = findings_about([replace(GOOD, index=5, **changes)])
    assert (finding.gpu, finding.problem, finding.health) == (5, problem, health)
    assert (finding.found, finding.expected) == (found, expected)
    (sentence,) = sentences_of([finding])
    assert sentence.startswith("GPU 5: ")
    assert says in sentence
    verdict = slowed_by(HEALTHY, [finding])
    assert fault_of([finding]) == (sentence if health is Health.FAULTY else "")
    assert verdict == (replace(HEALTHY, health=Health.SLOW, reason=sentence) if health is Health.SLOW else HEALTHY)


def test_every_problem_has_a_test():
    named = test_each_problem_is_found_with_its_evidence_and_said_with_what_to_do.pytestmark[0].args[1]
    assert {case[1] for case in named} == set(GpuProblem)


def test_what_cannot_be_read_is_no_evidence():
    nothing = GpuFacts(index=0, name=GOOD.name, nvml=NvmlState.READ)
    assert findings_about([nothing]) == ()


def test_a_card_without_a_bridge_has_no_links_that_could_be_down():
    assert findings_about([replace(GOOD, num_nvlinks_up=0)]) == ()


def test_slow_products_say_what_holds_the_clocks_down():
    (finding,) = findings_about([replace(GOOD, product_flops=3e14)])
    assert finding.limits == (ClockLimit.POWER_CAP,)
    assert "power cap" in sentences_of([finding])[0]


def test_the_gravest_comes_first_and_what_is_alike_is_said_once():
    gpus = [replace(GOOD, index=index, nvml=NvmlState.NO_MODULE) for index in range(3)]
    gpus.append(replace(GOOD, index=3, pcie_width=8, repair_failed=True))
    findings = findings_about(gpus)
    assert [finding.problem for finding in findings[:2]] == [GpuProblem.REPAIR_FAILED, GpuProblem.PCIE_WIDTH]
    assert [sentence.partition(":")[0] for sentence in sentences_of(findings)] == ["GPU 3", "GPU 3", "GPU 0, 1, 2"]


def test_a_node_that_is_at_fault_itself_stays_so():
    findings = findings_about([replace(GOOD, pcie_width=8)])
    for health in (Health.SLOW, Health.FAULTY, Health.UNDECIDED):
        verdict = NodeVerdict(node="a", health=health, reason="its own", factor=2.0)
        assert slowed_by(verdict, findings) == verdict
