"""The table of a node check, as text."""

from __future__ import annotations

from rich.console import Console

from oobleck.control.node_check import (
    CheckedNode,
    CheckReport,
    GpuFacts,
    Health,
    NodeVerdict,
    NvmlState,
    findings_about,
    slowed_by,
)
from oobleck.ui.check_table import check_table


def gpu(index: int, **changes: object) -> GpuFacts:
    speeds = {"product_flops": 6.4e14 + 1e13 * index, "memory_bytes_per_s": 2.9e12}
    return GpuFacts(index=index, name="NVIDIA H100 80GB HBM3", **{"nvml": NvmlState.READ, **speeds, **changes})


def text_of(*gpus: GpuFacts) -> str:
    findings = findings_about(gpus)
    verdict = slowed_by(NodeVerdict(node="a", health=Health.HEALTHY, reason=""), findings)
    node = CheckedNode(verdict=verdict, gpus=gpus, findings=findings)
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(
            check_table(CheckReport(nodes=(node,), links=(), exchanges=(), num_rounds=2, elapsed_s=9.0)), soft_wrap=True
        )
    return captured.get()


def test_gpus_that_do_well_are_a_line_with_their_speeds():
    text = text_of(gpu(0), gpu(1))
    assert "a: its GPUs reach 640 to 650 TFLOP/s in bfloat16, and copy at 2.9 TB/s to 2.9 TB/s" in text
    assert "all 1 nodes are healthy" in text


def test_what_is_wrong_with_a_gpu_is_said_once_and_names_it():
    text = text_of(gpu(0), gpu(1, pcie_width=8, max_pcie_width=16, num_nvlinks=18, num_nvlinks_up=17))
    assert text.count("GPU 1: it has 8 of 16 PCIe lanes") == 1
    assert text.count("GPU 1: 17 of 18 NVLinks are up") == 1
    assert "not healthy: a (slow)" in text


def test_what_could_not_be_read_is_a_note_for_all_gpus_and_changes_no_verdict():
    text = text_of(gpu(0, nvml=NvmlState.NO_MODULE), gpu(1, nvml=NvmlState.NO_MODULE))
    assert text.count("nvidia-ml-py") == 1
    assert "GPU 0, 1: " in text
    assert "all 1 nodes are healthy" in text
